"""Damaged and odd files, through every import that meets them: refused, left out, or repaired, each by its rule.

One table for images, which all formats share, and one for the annotation files of each. What is kept has the place in
the image that it was annotated at; nothing is different without being counted.
"""

import io
import json
import os

import numpy as np
import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_trainer.data.images import SCALE, ImageError, load_image
from stage2_trainer.data.records import load_records
from stage2_trainer.data.run_records import size_fault
from stage2_trainer.data.signatures import CONVERT, FETCH
from stage2_trainer.prepare import annotations as rules
from stage2_trainer.prepare import coco, record_writer, voc, yolo
from stage2_trainer.prepare.coco import read_coco
from tests.unit.trainer.prepare import odd_sets
from tests.unit.trainer.prepare.odd_sets import Imported, import_voc, import_yolo, picture, unreadable, voc_object

SIZE = (100, 200)
PLACE = [100, 100, 600, 500]  # bins; pixels 10 to 60 and 20 to 100


def encoded(mode="RGB", form="PNG", size=SIZE, orientation=None, **options):
    file = io.BytesIO()
    exif = Image.Exif()
    if orientation:
        exif[274] = orientation
        options["exif"] = exif
    Image.new(mode, size).save(file, format=form, **options)
    return file.getvalue()


def dim():
    """An image of 16 bits whose upper four are empty."""
    file = io.BytesIO()
    Image.fromarray(np.full(SIZE[::-1], 4095, np.uint16)).save(file, format="PNG")
    return file.getvalue()


def animated():
    frames = [Image.new("RGB", SIZE, color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, format="GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def test_image_with_undecodable_file_name_is_left_out(tmp_path):
    """As an archive of another system unpacks it."""
    data = odd_sets.yolo(tmp_path, {"a.jpg": "0 0.35 0.3 0.5 0.4", os.fsdecode(b"\xff.jpg"): None})
    found = import_yolo(tmp_path, data)
    assert (len(found.records), found.tally.images_left_out) == (1, {record_writer.NO_TEXT: 1})


KEPT = None
HEIC = b"\0\0\0\x18ftypheic" + bytes(40)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"
FLOATS = "its pixels are floats of more than 16 bits, and nothing says which of them is white"
EMPTY_BITS = "it has 16 bits, and is nearly all below a quarter of white: its upper bits are empty"
TOO_THIN = "one side is more than 200 times the other, which the model's image processor refuses"
BOMB = b"BM" + (0).to_bytes(8, "little") + (54).to_bytes(4, "little") + (40).to_bytes(4, "little")
BOMB += (60_000).to_bytes(4, "little") * 2 + b"\x01\0\x18\0" + bytes(24)

# An image, and why an import leaves it out, or KEPT; in the order coco, yolo, voc where the formats differ.
IMAGES = {
    "a JPEG of CMYK": (encoded("CMYK", "JPEG"), KEPT),
    "a PNG of 16 bits": (encoded("I;16"), KEPT),
    "a palette with a transparent colour": (encoded("P", transparency=0), KEPT),
    "one bit a pixel": (encoded("1"), KEPT),
    "an animation": (animated(), KEPT),
    "a PNG under the name of a JPEG": (encoded(), KEPT),
    "a JPEG that is cut off behind its header": (encoded(form="JPEG")[:-30], KEPT),
    "a PNG that is cut off within its header": (encoded()[:20], unreadable("it is a damaged PNG file")),
    "an empty file": (b"", unreadable("it is empty")),
    "a web page that says 404": (b"<html>Not found</html>", unreadable("it is HTML, no image")),
    "HEIC under the name of a JPEG": (HEIC, unreadable("it is HEIC, which is not read", CONVERT)),
    "a pointer of Git LFS": (POINTER, unreadable("it is a pointer of Git LFS, not the image", FETCH)),
    "floats": (encoded("F", "TIFF"), unreadable(FLOATS, SCALE)),
    "12 bits in 16": (dim(), unreadable(EMPTY_BITS, SCALE)),
    "an image of 3.6 gigapixels": (BOMB, unreadable("it has more than 90,000,000 pixels", "make it smaller")),
    "a line of one pixel": (encoded(size=(1, 201)), unreadable(TOO_THIN, "cut it into pieces")),
    "no file": (None, record_writer.MISSING),
    "turned, where annotations say the shown size": (
        encoded(form="JPEG", size=(200, 100), orientation=6),
        (KEPT, record_writer.TURNED, KEPT),
    ),
    "mirrored": (encoded(form="JPEG", orientation=2), record_writer.TURNED),
    "half the size": (encoded(size=(50, 100)), (record_writer.OTHER_SIZE, KEPT, record_writer.OTHER_SIZE)),
}


def from_coco(folder, content):
    path = written_image(folder / "images" / "a.jpg", content)
    document = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": SIZE[0], "height": SIZE[1]}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 20, 50, 80]}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (folder / "x.json").write_text(json.dumps(document))
    return Imported(folder / "out" / "x.jsonl", lambda tally: read_coco(folder / "x.json", path.parent, tally))


def from_yolo(folder, content):
    data = odd_sets.yolo(folder, {"a.jpg": "0 0.35 0.3 0.5 0.4"})
    written_image(folder / "images" / "train" / "a.jpg", content)
    return import_yolo(folder, data)


def from_voc(folder, content):
    source = odd_sets.voc(folder / "voc", {"a": voc_object("cat", (11, 21, 60, 100))}, size=SIZE)
    written_image(source / "JPEGImages" / "a.jpg", content)
    return import_voc(folder, source)


def written_image(path, content):
    picture(path)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    return path


IMPORTS = {"coco": from_coco, "yolo": from_yolo, "voc": from_voc}


@pytest.mark.parametrize("name", IMPORTS)
@pytest.mark.parametrize("case", IMAGES)
def test_odd_image_is_kept_or_left_out_as_listed(tmp_path, case, name):
    content, reasons = IMAGES[case]
    reason = reasons[list(IMPORTS).index(name)] if isinstance(reasons, tuple) else reasons
    if name == "yolo" and content is None:
        return  # images without files are found by their labels: test_yolo
    found = IMPORTS[name](tmp_path, content)
    if reason is not KEPT:
        assert (found.records, found.counts) == ([], {reason: 1})
        return
    assert (found.objects, found.counts) == ([("cat", PLACE)], {})
    (record,) = load_records(found.output)
    assert size_fault(record) is None
    if "cut off" in case:  # training sets it aside
        with pytest.raises(ImageError):
            load_image(record.images[0])
    else:
        assert load_image(record.images[0]).size == (record.width, record.height)


IMAGE = {"id": 1, "file_name": "a.png", "width": 100, "height": 200}
ANNOTATION = {"id": 7, "image_id": 1, "category_id": 1, "bbox": [10, 20, 50, 80]}


def document(**changes):
    whole = {"images": [IMAGE], "annotations": [ANNOTATION], "categories": [{"id": 1, "name": "cat"}]}
    return json.dumps(whole | changes).encode()


def annotations(*changes):
    return document(annotations=[ANNOTATION | change for change in changes])


GOOD = [("cat", PLACE)]
NO_RUNS = {"size": [200, 100], "counts": "]["}

# A COCO file, and the objects and counts that it gives, or what it is refused with.
COCO = {
    "a byte order mark": (b"\xef\xbb\xbf" + document(), GOOD, {}),
    "in UTF-16": (document().decode().encode("utf-16"), GOOD, {}),
    "an annotation twice": (annotations({}, {}), GOOD * 2, {}),
    "an id that is true": (document(images=[{"id": True, "file_name": "a.png"}]), r"images\[0\]\.id: true", None),
    "an id that is a list": (annotations({"image_id": [1]}, {}), GOOD, {coco.NO_IMAGE: 1}),
    "a box as a mapping": (annotations({"bbox": {"x": 1}}, {}), GOOD, {rules.BROKEN_BOX: 1}),
    "a box without an end": (
        document().replace(b"[10, 20, 50, 80]", b"[10, 20, 50, Infinity]"),
        [],
        {rules.BROKEN_BOX: 1},
    ),
    "a box below zero": (
        annotations({"bbox": [-90, -80, 150, 180]}),
        [("cat", [0, 0, 600, 500])],
        {record_writer.CLIPPED: 1},
    ),
    "runs that are cut off": (annotations({"segmentation": NO_RUNS}), [], {rules.BROKEN_OUTLINE: 1}),
    "a box of a number that no float holds": (
        annotations({"bbox": [10**400, 1, 1, 1]}, {}),
        GOOD,
        {rules.BROKEN_BOX: 1},
    ),
    "sizes of another image, as floats": (
        document(images=[IMAGE | {"width": 640.0, "height": 480.0}]),
        [],
        {record_writer.OTHER_SIZE: 1},
    ),
    "sizes of another image, as text": (
        document(images=[IMAGE | {"width": "640", "height": "480"}]),
        [],
        {record_writer.OTHER_SIZE: 1},
    ),
    "its sizes as floats": (document(images=[IMAGE | {"width": 100.0, "height": "200"}]), GOOD, {}),
    "a federated list that is a number": (
        document(images=[IMAGE | {"neg_category_ids": 5}]),
        r"images 1\.neg_category_ids: 5",
        None,
    ),
    "a federated list of lists": (
        document(images=[IMAGE | {"neg_category_ids": [[1]]}]),
        r"images 1\.neg_category_ids",
        None,
    ),
    "a federated id of no category": (
        document(images=[IMAGE | {"neg_category_ids": [1, 9]}]),
        GOOD,
        {coco.NO_FEDERATED: 1},
    ),
    "half of a surrogate pair as a name": (document(categories=[{"id": 1, "name": "\ud800"}]), r"1\.name", None),
    "half of a surrogate pair as an id": (document(images=[IMAGE | {"id": "\ud800"}]), r"images\[0\]\.id", None),
    "a category without a name": (document(categories=[{"id": 1}]), r"categories 1\.name", None),
    "a file above the folder": (document(images=[{"id": 1, "file_name": "../a.png"}]), [], {record_writer.MISSING: 1}),
}


def import_coco(folder, content, **choice):
    picture(folder / "images" / "a.png")
    (folder / "x.json").write_bytes(content)
    read = lambda tally: read_coco(folder / "x.json", folder / "images", tally, outlines=True)  # noqa: E731
    return Imported(folder / "out" / "x.jsonl", read, **choice)


@pytest.mark.parametrize("case", COCO)
def test_odd_coco_file_is_read_or_refused_as_listed(tmp_path, case):
    content, objects, counts = COCO[case]
    if isinstance(objects, str):
        with pytest.raises(ConfigError, match=objects):
            import_coco(tmp_path, content)
        assert not (tmp_path / "out").exists()
        return
    found = import_coco(tmp_path, content)
    assert (found.objects, found.counts) == (objects, counts)


CORNERS = [("cat", [100, 100, 600, 100, 600, 500, 100, 500])]
OUTLINES = {
    "runs of another size, where the file says none": (
        document(
            images=[{"id": 1, "file_name": "a.png"}],
            annotations=[ANNOTATION | {"segmentation": {"size": [10, 10], "counts": [0, 100]}}],
        ),
        [],
        {rules.OTHER_MASK: 1},
    ),
    "runs of no pixel": (
        annotations({"segmentation": {"size": [200, 100], "counts": [20_000]}}),
        CORNERS,
        {record_writer.NO_OUTLINE: 1},
    ),
    "a polygon outside": (
        annotations({"segmentation": [[-50, -50, -30, -10, -30, -15]]}),
        CORNERS,
        {record_writer.NO_OUTLINE: 1, record_writer.OUTLINE_CLIPPED: 1},
    ),
    "a polygon that reaches out": (
        annotations({"segmentation": [[10, 20, 60, 20, 60, 250]]}),
        [("cat", [100, 100, 600, 100, 600, 999])],
        {record_writer.OUTLINE_CLIPPED: 1},
    ),
}


@pytest.mark.parametrize("case", OUTLINES)
def test_odd_outline_is_left_out_or_counted(tmp_path, case):
    content, objects, counts = OUTLINES[case]
    found = import_coco(tmp_path, content, geometry="poly")
    assert (found.objects, found.counts) == (objects, counts)


TEXTS = {
    "a byte order mark": ("\ufeff0 0.35 0.3 0.5 0.4", GOOD, {}),
    "lines of Windows": ("0 0.35 0.3 0.5 0.4\r\n\r\n", GOOD, {}),
    "commas": ("0,0.35,0.3,0.5,0.4", [], {yolo.BROKEN_LINE: 1}),
    "an outline of two points": ("0 0.1 0.1 0.2", [], {yolo.BROKEN_LINE: 1}),
    "a comment": ("# cat\n0 0.35 0.3 0.5 0.4", GOOD, {yolo.BROKEN_LINE: 1}),
}


@pytest.mark.parametrize("case", TEXTS)
def test_odd_yolo_label_file_is_read_as_listed(tmp_path, case):
    text, objects, counts = TEXTS[case]
    found = import_yolo(tmp_path, odd_sets.yolo(tmp_path, {"a.png": text}))
    assert (found.objects, found.counts) == (objects, counts)


XML = {
    "a byte order mark": ("\ufeff<annotation>{}</annotation>", GOOD, {}),
    "a name space": ("<annotation xmlns='http://x'>{}</annotation>", [], {voc.BROKEN_ANNOTATION: 1}),
    "a size of another image, as floats": (
        "<annotation><size><width>640.0</width><height>480.0</height></size>{}</annotation>",
        [],
        {record_writer.OTHER_SIZE: 1},
    ),
    "cut off": ("<annotation>{}", [], {voc.BROKEN_ANNOTATION: 1}),
    "spaces around values": ("<annotation> <filename> a.jpg </filename>{} </annotation>", GOOD, {}),
}


@pytest.mark.parametrize("case", XML)
def test_odd_voc_xml_file_is_read_as_listed(tmp_path, case):
    text, objects, counts = XML[case]
    source = odd_sets.voc(tmp_path / "voc", {"a": ""})
    inner = voc_object(" cat ", (" 11 ", 21, 60, 100))
    (source / "Annotations" / "a.xml").write_text(text.format(inner), encoding="utf-8")
    found = import_voc(tmp_path, source)
    assert (found.objects, found.counts) == (objects, counts)
