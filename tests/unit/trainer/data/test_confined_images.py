"""Images of a data file lie in its folder, or in one that a person has named; nothing else is read, sent or shown."""

import json
import os
import socket
import stat
from dataclasses import replace

import datasets
import pytest

from stage2_api.errors import ConfigError
from stage2_report.html_page import PageRequest, render_page
from stage2_report.picture import write_held_out
from stage2_report.run_history import EvaluatedRun
from stage2_report.sample_cards import thumbnail
from stage2_trainer.data.images import ImageError, image_url, load_image, read_header
from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.prepare import record_writer
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.hugging_face import HubChoice
from tests.unit.report.reported import write_run
from tests.unit.trainer.prepare.odd_sets import Imported, import_voc, import_yolo, picture, voc, voc_object, yolo
from tests.unit.trainer.prepare.test_hugging_face import imported, row

OUTSIDE = {record_writer.OUTSIDE: 1}
ELSEWHERE = [
    "../private/scan.png",
    "{}/private/scan.png",
    "link.png",
    "folder/scan.png",
    "images/../../private/scan.png",
]


@pytest.fixture(autouse=True)
def no_further_folder(monkeypatch):
    monkeypatch.delenv("ROOT_IMAGE_DIR", raising=False)


@pytest.fixture
def data(tmp_path):
    """A folder of data beside a private one, to which two links in the former lead."""
    private = picture(tmp_path / "private" / "scan.png")
    picture(tmp_path / "data" / "images" / "a.png")
    (tmp_path / "data" / "link.png").symlink_to(private)
    (tmp_path / "data" / "folder").symlink_to(private.parent)
    return tmp_path / "data"


def records_of(folder, image, **rules):
    line = {"images": [str(image).format(folder.parent)], "width": 100, "height": 200, "objects": []}
    (folder / "x.jsonl").write_text(json.dumps(line) + "\n")
    return load_records(folder / "x.jsonl", rules=RecordRules(**rules))


@pytest.mark.parametrize("exist", [True, False])
@pytest.mark.parametrize("image", [*ELSEWHERE, "/etc/passwd", "/proc/self/environ", "/dev/zero", "../lost.png"])
def test_record_image_outside_data_folder_is_refused(data, image, exist):
    with pytest.raises(ConfigError, match=r"x\.jsonl:1 images\[0\]: .*outside of the data file's folder.*image_roots"):
        records_of(data, image, images_exist=exist)


@pytest.mark.parametrize("image", ELSEWHERE)
def test_image_outside_data_folder_is_allowed_below_named_image_root(data, monkeypatch, image):
    named = str(data.parent / "private")
    (record,) = records_of(data, image, image_roots=(named,))
    assert record.images == (f"{named}/scan.png",)
    monkeypatch.setenv("ROOT_IMAGE_DIR", os.pathsep.join(["/nowhere", named]))
    assert records_of(data, image) == [record]


def test_symlinked_data_folder_contains_its_own_images(data, tmp_path):
    (tmp_path / "again").symlink_to(data)
    (record,) = records_of(tmp_path / "again", "images/a.png")
    assert record.images == (str(data / "images" / "a.png"),)


def device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:  # only root makes one
        path.symlink_to("/dev/zero")


def listening(path):
    before = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


TARGETS = ["/proc/self/environ", "/proc/self/mem", "/proc/self/fd/0", "/proc/self/root/etc/passwd", "/proc/self/cwd"]
TARGETS += ["/dev/stdin", "/dev/tcp", "../private/scan.png", "folder/scan.png", "link.png", "lost.png", "odd.png"]
SPECIAL = {"a FIFO": os.mkfifo, "a device": device, "a socket": listening, "a folder": os.mkdir}
SPECIAL |= {f"a link to {to}": lambda path, to=to: path.symlink_to(to) for to in TARGETS}
special = pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)


@special
@pytest.mark.parametrize("exist", [True, False])
def test_image_that_is_not_regular_file_is_refused_by_every_reader(data, make, exist):
    make(data / "odd.png")
    try:
        (record,) = records_of(data, "odd.png", images_exist=exist)
    except ConfigError:
        return
    for read in (image_url, load_image, read_header):
        with pytest.raises(ImageError):
            read(record.images[0])


def import_coco(data):
    image = {"id": 1, "file_name": "odd.png", "width": 100, "height": 200}
    document = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (data.parent / "x.json").write_text(json.dumps(document))
    return Imported(data.parent / "out" / "x.jsonl", lambda tally: read_coco(data.parent / "x.json", data, tally))


def import_list_of_yolo(data):
    file = yolo(data, {"b.png": None}, train="list.txt")
    (data / "list.txt").write_text("odd.png\n")
    return import_yolo(data.parent, file)


def import_saved(data):
    rows = [{"image": {"bytes": None, "path": str(data / "odd.png")}, "objects": row()["objects"]}]
    datasets.Dataset.from_list(rows).save_to_disk(data.parent / "saved")
    return imported(data.parent, data.parent / "saved", HubChoice("coco", image="image", names=["cat"]))


def import_files_of_voc(data):
    voc(data, {"odd": voc_object()}, images=[], file_name="odd.png")
    (data / "JPEGImages").mkdir(exist_ok=True)
    (data / "odd.png").rename(data / "JPEGImages" / "odd.png")
    return import_voc(data.parent, data)


@special
@pytest.mark.parametrize("read", [import_coco, import_list_of_yolo, import_saved, import_files_of_voc])
def test_imports_skip_image_that_is_not_regular_file(data, make, read):
    make(data / "odd.png")
    assert read(data).records == []


@special
def test_page_of_saved_log_hides_image_that_is_not_regular_file(data, make):
    make(data / "odd.png")
    (record,) = records_of(data, "images/a.png")
    assert thumbnail(replace(record, images=("/elsewhere/odd.png",)), data).url == ""


@pytest.mark.parametrize("content", [b"secret", b"\x89PNG\r\n\x1a\nsecret", b""])
def test_non_image_bytes_are_refused_before_sending(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(ImageError):
        image_url(str(tmp_path / "a.png"))


def test_truncated_image_is_refused_before_sending(tmp_path):
    whole = picture(tmp_path / "a.jpg", (300, 300)).read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError):
        image_url(str(tmp_path / "a.jpg"))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_coco_import_leaves_out_images_outside_image_folder(data, tmp_path, name):
    image = {"id": 1, "file_name": name.format(tmp_path), "width": 100, "height": 200}
    (tmp_path / "x.json").write_text(
        json.dumps({"images": [image], "annotations": [], "categories": [{"id": 1, "name": "cat"}]})
    )
    found = Imported(tmp_path / "out" / "x.jsonl", lambda tally: read_coco(tmp_path / "x.json", data, tally))
    assert (found.records, found.tally.images_left_out) == ([], OUTSIDE)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_yolo_import_leaves_out_listed_images_outside_its_folder(data, tmp_path, name):
    file = yolo(data, {"b.png": None}, train="list.txt")
    (data / "list.txt").write_text(f"{name.format(tmp_path)}\n")
    found = import_yolo(tmp_path, file)
    assert (found.records, found.tally.images_left_out) == ([], OUTSIDE)


@pytest.mark.parametrize("path", ["../private", "{}/private"])
def test_yolo_import_leaves_out_images_of_split_outside_its_folder(data, tmp_path, path):
    file = yolo(data, {"b.png": None}, path=path.format(tmp_path), train=".")
    found = import_yolo(tmp_path, file)
    assert (found.records, found.tally.images_left_out) == ([], OUTSIDE)


@pytest.mark.parametrize("name", ["../link.png", "{}/private/scan.png", "../folder/scan.png", "../../private/scan.png"])
def test_voc_import_leaves_out_images_outside_its_folder(data, tmp_path, name):
    voc(data, {"x": voc_object()}, images=["y"], file_name=name.format(tmp_path))
    found = import_voc(tmp_path, data)
    assert (found.records, found.tally.images_left_out[record_writer.OUTSIDE]) == ([], 1)


def test_voc_import_leaves_out_images_when_image_folder_links_outside(data, tmp_path):
    voc(data, {"scan": voc_object()}, images=[])
    (data / "JPEGImages").symlink_to(tmp_path / "private")
    found = import_voc(tmp_path, data)
    assert (found.records, found.tally.images_left_out) == ([], OUTSIDE)


def test_saved_dataset_import_leaves_out_images_outside_its_folder(data, tmp_path):
    cell = {"bytes": None, "path": str(tmp_path / "private" / "scan.png")}
    rows = [{"image": cell, "objects": row()["objects"]}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    found = imported(tmp_path, tmp_path / "saved", HubChoice("coco", image="image", names=["cat"]))
    assert (found.records, found.tally.images_left_out) == ([], OUTSIDE)


def test_import_reports_image_folder_outside_output_folder(data, tmp_path):
    image = {"id": 1, "file_name": "a.png", "width": 100, "height": 200}
    (tmp_path / "x.json").write_text(
        json.dumps({"images": [image], "annotations": [], "categories": [{"id": 1, "name": "cat"}]})
    )
    read = lambda tally: read_coco(tmp_path / "x.json", data / "images", tally)  # noqa: E731
    assert Imported(tmp_path / "out" / "x.jsonl", read).tally.outside == {str(data / "images")}
    assert Imported(data / "x.jsonl", read).tally.outside == set()


def test_page_of_saved_log_shows_only_images_beside_log(tmp_path):
    run = write_run(tmp_path / "run")
    own = render_page(PageRequest([run], tmp_path / "page.html"))
    (tmp_path / "saved").mkdir()
    log = (run / "stage2_log.jsonl").rename(tmp_path / "saved" / "learner.log")
    (run / "rollouts.jsonl").rename(tmp_path / "saved" / "rollouts.jsonl")
    saved = render_page(PageRequest([log], tmp_path / "page.html"))
    assert "data:image/jpeg" in own
    assert "data:image/jpeg" not in saved
    (tmp_path / "saved" / "0.png").symlink_to(run / "0.png")
    assert "data:image/jpeg" not in render_page(PageRequest([log], tmp_path / "page.html"))
    with pytest.raises(ConfigError, match=r"--images: .*0\.png: leads out of"):
        write_held_out([EvaluatedRun("a", log, [0, 2])], tmp_path / "a.png", images=log.parent)
