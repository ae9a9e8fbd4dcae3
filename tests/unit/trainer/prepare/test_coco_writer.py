"""Records become a COCO file again: a round trip loses nothing but what is counted."""

import contextlib
import io
import json
import random

import pytest
from pycocotools.coco import COCO

from stage2_api.errors import ConfigError
from stage2_trainer.data.records import AS_DECLARED, RecordRules
from stage2_trainer.prepare import coco
from stage2_trainer.prepare.annotations import Tally
from stage2_trainer.prepare.coco import NO_OBJECT, read_coco, write_coco
from stage2_trainer.prepare.record_writer import RecordChoice, write_records
from tests.unit.trainer.prepare.odd_sets import picture

SIZES = [(640, 480), (333, 500), (7, 1000), (1, 1)]
NAMES = {3: "dog", 5: "cat", 90: "Füße", 91: "nowhere"}


def import_random_set(folder, seed):
    """Write a COCO file of random objects, some of them outlined, with gaps in its ids."""
    draw = random.Random(seed)
    images, annotations = [], []
    for number, (width, height) in zip((17, 4, 139, 25), SIZES, strict=True):
        picture(folder / "images" / f"{number:012d}.png", (width, height))
        images.append({"id": number, "file_name": f"{number:012d}.png", "width": width, "height": height})
        for _ in range(draw.randrange(6)):
            xs, ys = (sorted(draw.uniform(0, side) for _ in range(2)) for side in (width, height))
            box = [xs[0], ys[0], xs[1] - xs[0], ys[1] - ys[0]]
            corners = [xs[0], ys[0], xs[1], ys[0], (xs[0] + xs[1]) / 2, ys[1]]
            one = {"id": len(annotations) * 3, "image_id": number, "category_id": draw.choice([3, 5, 90]), "iscrowd": 0}
            annotations.append(one | {"bbox": box, "segmentation": [corners]})
    images[0] |= {"neg_category_ids": [91], "not_exhaustive_category_ids": [3]}
    categories = [{"id": number, "name": name} for number, name in NAMES.items()]
    (folder / "first.json").write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories})
    )
    return folder / "first.json"


def records_of(file, images, output, geometry):
    tally = Tally()
    choice = RecordChoice(geometry=geometry, order="file")
    write_records(read_coco(file, images, tally, outlines=geometry == "poly"), output, choice, tally)
    return tally


def by_image(document):
    """Return what a COCO file says, without its own numbers."""
    names = {one["id"]: one["name"] for one in document["categories"]}
    found = {one["id"]: (one["width"], one["height"], []) for one in document["images"]}
    for one in document["annotations"]:
        found[one["image_id"]][2].append((names[one["category_id"]], one["bbox"], one["segmentation"]))
    return found


@pytest.mark.parametrize("geometry", ["bbox", "poly"])
@pytest.mark.parametrize("seed", range(5))
def test_a_round_trip_loses_nothing_but_what_is_counted(tmp_path, seed, geometry):
    first = import_random_set(tmp_path, seed)
    records, second = tmp_path / "records.jsonl", tmp_path / "images" / "second.json"
    counted = records_of(first, tmp_path / "images", records, geometry)
    lost = sum(counted.objects_left_out.values())
    written = Tally()
    write_coco(records, second, AS_DECLARED, written)
    before, after = (by_image(json.loads(path.read_text())) for path in (first, second))
    assert [(number, *one[:2]) for number, one in after.items()] == [(k, *v[:2]) for k, v in before.items()]
    assert written.objects == sum(len(one[2]) for one in before.values()) - lost
    if not lost:
        for number, (width, height, objects) in before.items():
            for (name, box, _), (again, other, outline) in zip(objects, after[number][2], strict=True):
                assert name == again
                edges = [(box[i], box[i] + box[i + 2], other[i], other[i] + other[i + 2]) for i in (0, 1)]
                for side, (low, high, low2, high2) in zip((width, height), edges, strict=True):
                    assert abs(low - low2) <= side / 1000
                    assert abs(high - high2) <= side / 1000
                assert bool(outline) == (geometry == "poly")
    again = tmp_path / "again.jsonl"
    records_of(second, tmp_path / "images", again, geometry)
    assert again.read_text() == records.read_text(), "records -> COCO -> records is exact"


def test_categories_without_objects_and_lists_of_lvis_come_through(tmp_path):
    first, records = import_random_set(tmp_path, 1), tmp_path / "records.jsonl"
    assert records_of(first, tmp_path / "images", records, "bbox").changed[NO_OBJECT] >= 1
    write_coco(records, tmp_path / "second.json", AS_DECLARED, Tally())
    document = json.loads((tmp_path / "second.json").read_text())
    numbers = {one["name"]: one["id"] for one in document["categories"]}
    assert list(numbers) == sorted(numbers)
    assert document["images"][0]["neg_category_ids"] == [numbers["nowhere"]]
    assert document["images"][0]["not_exhaustive_category_ids"] == [numbers["dog"]]
    assert document["images"][0]["file_name"] == "images/000000000017.png"


def test_pycocotools_reads_the_file(tmp_path):
    first, records = import_random_set(tmp_path, 2), tmp_path / "records.jsonl"
    records_of(first, tmp_path / "images", records, "poly")
    write_coco(records, tmp_path / "second.json", AS_DECLARED, Tally())
    with contextlib.redirect_stdout(io.StringIO()):
        found = COCO(str(tmp_path / "second.json"))
    assert sorted(found.getImgIds()) == [4, 17, 25, 139]
    for one in found.loadAnns(found.getAnnIds()):
        assert one["area"] >= 0
        assert one["area"] <= one["bbox"][2] * one["bbox"][3] + 1e-3


def write(folder, *changes):
    picture(folder / "a.png", (100, 50))
    good = {"images": ["a.png"], "width": 100, "height": 50, "units": "bins", "objects": []}
    (folder / "x.jsonl").write_text("".join(json.dumps(good | change) + "\n" for change in changes))
    return folder / "x.jsonl"


def check_images(folder, path, **rules):
    tally = Tally()
    write_coco(path, folder / "out.json", RecordRules(**rules), tally)
    return json.loads((folder / "out.json").read_text())["images"], tally


def test_names_that_are_no_numbers_stand_beside_numbers_of_lines(tmp_path):
    images, _ = check_images(tmp_path, write(tmp_path, {"sample_id": "7"}, {"sample_id": "b"}, {}))
    assert [(one["id"], one["sample_id"]) for one in images] == [(1, "7"), (2, "b"), (3, "x.jsonl:3")]


@pytest.mark.parametrize("names", [["7", "7"], ["07", "8"], ["-1", "2"], ["1.0", "2"], ["٣", "4"]])
def test_numbers_that_would_be_lost_are_no_ids(tmp_path, names):
    images, _ = check_images(tmp_path, write(tmp_path, *({"sample_id": name} for name in names)))
    assert [(one["id"], one["sample_id"]) for one in images] == [(1, names[0]), (2, names[1])]


def test_what_coco_has_no_place_for_is_counted(tmp_path):
    changes = ({"images": ["a.png", "a.png"]}, {"images": ["data:image/png;base64,AAAA"]}, {"summary": "s"})
    images, tally = check_images(tmp_path, write(tmp_path, *changes))
    assert len(images) == 1
    assert tally.images_left_out == {coco.SEVERAL_IMAGES: 1, coco.NO_FILE: 1}
    assert tally.changed == {coco.NO_PLACE: 1}


def test_a_broken_record_is_reported_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"x\.jsonl:2 width"):
        check_images(tmp_path, write(tmp_path, {}, {"width": 0}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "x.jsonl"]


def test_a_file_that_is_made_meanwhile_is_not_touched(tmp_path):
    path, output = tmp_path / "x.jsonl", tmp_path / "x.json"
    path.write_text('{"images": ["a.png"], "width": 9, "height": 9, "objects": []}\n')
    with pytest.raises(ConfigError, match=r"--coco: .*must be a new file"):
        write_coco(path, output, RecordRules(), Tally(), lambda line: output.write_text("mine") and None)
    assert output.read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["x.json", "x.jsonl"]


def test_a_file_that_is_there_is_not_touched(tmp_path):
    (tmp_path / "out.json").write_text("mine")
    with pytest.raises(ConfigError, match="--coco"):
        check_images(tmp_path, write(tmp_path, {}))
    assert (tmp_path / "out.json").read_text() == "mine"
