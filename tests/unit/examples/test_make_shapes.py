"""The data set script: the same arguments give the same files."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from stage2_trainer.data.profile import profile
from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.matching import GTObject
from tests.unit.examples.conftest import written_twice
from tiny_model.answers import truth
from tiny_model.dataset import Part, write_part
from tiny_model.scenes import draw


def _write(folder: Path, part: Part) -> Path:
    assert len(list(write_part(folder, part))) == part.count
    return folder / f"{part.name}.jsonl"


def test_trainer_reads_written_records(tmp_path):
    part = Part("train", 8, seed=7)
    for index, record in enumerate(load_records(_write(tmp_path, part))):
        assert list(record.objects) == truth(part.scene(index))


def test_pixel_coordinates_give_same_bins_as_tokens(tmp_path):
    tokens = load_records(_write(tmp_path / "tokens", Part("train", 20, seed=7)))
    pixels = load_records(_write(tmp_path / "pixels", Part("train", 20, seed=7, coordinates="pixels")))
    assert [record.objects for record in pixels] == [record.objects for record in tokens]


def test_margin_loosens_boxes_without_changing_image(tmp_path):
    (tight,) = load_records(_write(tmp_path / "tight", Part("train", 1, seed=3)))
    (loose,) = load_records(_write(tmp_path / "loose", Part("train", 1, seed=3, margin=6)))
    assert Path(tight.images[0]).read_bytes() == Path(loose.images[0]).read_bytes()
    for inner, outer in zip(tight.objects, loose.objects, strict=True):
        (x1, y1, x2, y2), (u1, v1, u2, v2) = _box(inner), _box(outer)
        grown = [x1 - u1, y1 - v1, u2 - x2, v2 - y2]
        assert all(0 <= bins <= 63 for bins in grown)
        assert max(grown) >= 62


def _box(found: GTObject) -> tuple[int, int, int, int]:
    bins = found.bins
    return min(bins[0::2]), min(bins[1::2]), max(bins[0::2]), max(bins[1::2])


def test_written_image_matches_scene_pixel_for_pixel(tmp_path):
    part = Part("held-out", 3, seed=7, size=64)
    line = _write(tmp_path, part).read_text().splitlines()[2]
    image = Image.open(tmp_path / json.loads(line)["images"][0])
    assert np.array_equal(np.asarray(image), draw(part.scene(2)))
    assert image.size == (64, 64)


def test_same_command_writes_same_bytes(tmp_path):
    folder = written_twice(tmp_path, "make_shapes.py", "--train", "5", "--held-out", "3")
    assert len((folder / "train.jsonl").read_text().splitlines()) == 5
    assert len((folder / "held-out.jsonl").read_text().splitlines()) == 3


def test_few_images_are_reproducible_and_listed_in_rows(tmp_path):
    folder = written_twice(tmp_path, "make_few.py", "--train", "60", "--held-out", "2")
    order = profile(folder / "train.jsonl", RecordRules(), lambda texts: [len(text) for text in texts]).order
    assert not order.is_missing
    assert len((folder / "held-out.jsonl").read_text().splitlines()) == 2
