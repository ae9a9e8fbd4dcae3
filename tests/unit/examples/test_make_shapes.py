"""The data set script: the same arguments give the same files."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from stage2_trainer.data.records import load_records
from tests.unit.examples.conftest import EXAMPLES
from tiny_model.dataset import Part, write_part
from tiny_model.scenes import draw


def _write(folder: Path, part: Part) -> Path:
    assert len(list(write_part(folder, part))) == part.count
    return folder / f"{part.name}.jsonl"


def _fingerprints(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_trainer_reads_what_is_written(tmp_path):
    part = Part("train", 8, seed=7)
    for index, record in enumerate(load_records(_write(tmp_path, part))):
        expected = [{"desc": desc, key: bins} for desc, key, bins in part.scene(index).objects()]
        assert list(record.payload.values()) == expected


def test_pixel_coordinates_are_read_as_the_same_bins_as_coord_tokens(tmp_path):
    tokens = load_records(_write(tmp_path / "tokens", Part("train", 20, seed=7)))
    pixels = load_records(_write(tmp_path / "pixels", Part("train", 20, seed=7, coordinates="pixels")))
    assert [record.payload for record in pixels] == [record.payload for record in tokens]


def test_an_image_on_disk_holds_the_scene_pixel_for_pixel(tmp_path):
    part = Part("held-out", 3, seed=7, size=64)
    line = _write(tmp_path, part).read_text().splitlines()[2]
    image = Image.open(tmp_path / json.loads(line)["images"][0])
    assert np.array_equal(np.asarray(image), draw(part.scene(2)))
    assert image.size == (64, 64)


def test_the_same_command_writes_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        command = [
            sys.executable,
            str(EXAMPLES / "make_shapes.py"),
            str(tmp_path / name),
            "--train",
            "5",
            "--held-out",
            "3",
        ]
        subprocess.run(command, check=True, capture_output=True)
    assert _fingerprints(tmp_path / "a") == _fingerprints(tmp_path / "b")
    assert len((tmp_path / "a" / "train.jsonl").read_text().splitlines()) == 5
    assert len((tmp_path / "a" / "held-out.jsonl").read_text().splitlines()) == 3
