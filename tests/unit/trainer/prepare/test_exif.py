"""Images that EXIF turns: boxes and outlines follow, from the stored pixels or the shown ones."""

import json

import numpy as np
import pytest
from PIL import Image, ImageDraw

from stage2_trainer.data.images import load_image
from stage2_trainer.data.records import load_records
from stage2_trainer.prepare import record_writer
from stage2_trainer.prepare.coco import read_coco
from tests.unit.trainer.prepare.odd_sets import Imported, import_yolo, yolo

STORED, BOX = (100, 60), (10, 20, 40, 50)  # x1, y1, x2, y2


def marked(path, orientation, size=STORED):
    """Write an image whose box is red, turned by EXIF alone."""
    image = Image.new("RGB", size)
    ImageDraw.Draw(image).rectangle((BOX[0], BOX[1], BOX[2] - 1, BOX[3] - 1), fill="red")
    exif = Image.Exif()
    exif[274] = orientation
    path.parent.mkdir(exist_ok=True)
    image.save(path, exif=exif)


def imported(folder, size, **choice):
    x1, y1, x2, y2 = BOX
    outline = [x1, y1, x2, y1, x2, y2, x1, y2]
    one = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [x1, y1, x2 - x1, y2 - y1], "segmentation": [outline]}
    image = {"id": 1, "file_name": "a.png", **({"width": size[0], "height": size[1]} if size else {})}
    document = {"images": [image], "annotations": [one], "categories": [{"id": 1, "name": "red"}]}
    (folder / "x.json").write_text(json.dumps(document))
    read = lambda tally: read_coco(folder / "x.json", folder / "images", tally, outlines=True)  # noqa: E731
    return Imported(folder / "out" / "x.jsonl", read, **choice)


def red_in_image(record):
    """The bins of what is red as the image is shown."""
    pixels = np.asarray(load_image(record.images[0]))
    ys, xs = np.nonzero(pixels[..., 0] > 128)
    height, width = pixels.shape[:2]
    return [xs.min() / width, ys.min() / height, (xs.max() + 1) / width, (ys.max() + 1) / height]


@pytest.mark.parametrize("geometry", ["bbox", "poly"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_annotations_of_stored_pixels_follow_exif_orientation(tmp_path, orientation, geometry):
    marked(tmp_path / "images" / "a.png", orientation)
    found = imported(tmp_path, STORED, geometry=geometry, exif="raw")
    (record,) = load_records(found.output)
    (one,) = record.objects
    box = [min(one.bins[::2]), min(one.bins[1::2]), max(one.bins[::2]), max(one.bins[1::2])]
    assert np.abs(np.array(box) / 1000 - red_in_image(record)).max() <= 0.001
    assert found.tally.changed[record_writer.FOLLOWED] == (orientation > 1)


def test_annotated_size_decides_orientation_and_missing_size_needs_option(tmp_path):
    marked(tmp_path / "images" / "a.png", 6)
    assert imported(tmp_path, STORED).tally.changed == {record_writer.FOLLOWED: 1}
    (tmp_path / "out" / "x.jsonl").unlink()
    assert imported(tmp_path, STORED[::-1]).tally.changed == {}
    (tmp_path / "out" / "x.jsonl").unlink()
    for nothing in (None, (0, 0), (-1, -1)):
        assert imported(tmp_path, nothing).tally.images_left_out == {record_writer.TURNED: 1}
    assert imported(tmp_path, None, exif="shown").tally.records == 1


def test_yolo_boxes_follow_exif_orientation(tmp_path):
    marked(tmp_path / "a.png", 6)
    data = yolo(tmp_path / "set", {"a.png": "0 .25 .5833333 .3 .5"})
    (tmp_path / "a.png").replace(tmp_path / "set" / "images" / "train" / "a.png")
    (record,) = load_records(import_yolo(tmp_path, data, exif="raw").output)
    assert np.abs(np.array(record.objects[0].bins) / 1000 - red_in_image(record)).max() <= 0.001
