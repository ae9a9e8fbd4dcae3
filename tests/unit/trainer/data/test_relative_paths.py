"""Records name images by paths that lead to them, whichever of the folders between them are links."""

import os
from pathlib import Path

import pytest

from stage2_trainer.data.files import relative_path
from stage2_trainer.data.records import load_records
from tests.unit.trainer.prepare.odd_sets import import_yolo, picture, yolo


@pytest.fixture
def linked(tmp_path):
    """A folder that is a link to one that lies deeper."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "real" / "deep")
    return tmp_path / "out"


def test_relative_path_from_symlinked_folder_leads_to_image(tmp_path, linked):
    found = import_yolo(tmp_path, yolo(tmp_path / "set", {"a.jpg": "0 .5 .5 .5 .5"}))
    (record,) = load_records(found.output)
    assert record.images == (str(tmp_path / "set" / "images" / "train" / "a.jpg"),)
    assert os.path.samefile(linked / relative_path(Path(record.images[0]), linked), record.images[0])


def test_image_is_found_through_parent_of_symlinked_folder(tmp_path, linked):
    yolo(tmp_path / "real" / "set", {"a.jpg": "0 .5 .5 .5 .5"})
    found = import_yolo(tmp_path / "else", linked / ".." / "set" / "data.yaml")
    assert load_records(found.output)[0].images == (str(tmp_path / "real" / "set" / "images" / "train" / "a.jpg"),)


def test_relative_path_keeps_names_of_symlinks(tmp_path):
    """A folder of links goes to another machine with the data file."""
    kept = picture(tmp_path / "elsewhere" / "a.jpg")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images").symlink_to(kept.parent)
    (tmp_path / "data" / "b.jpg").symlink_to(kept)
    for name in ("images/a.jpg", "b.jpg"):
        assert relative_path(tmp_path / "data" / name, tmp_path / "data") == name
    assert relative_path(tmp_path / "data" / "b.jpg", tmp_path / "out") == "../data/b.jpg"
