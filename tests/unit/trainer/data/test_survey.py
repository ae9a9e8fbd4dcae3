"""A data file is looked over to the end, or as far as asked: counts, every mistake, missing images."""

from __future__ import annotations

import json

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data.profile import survey
from stage2_trainer.data.records import AS_DECLARED

BOX = {"desc": "a", "bbox_2d": [1, 2, 3, 4]}
POLY = {"desc": "b", "poly": [1, 2, 3, 4, 5, 6]}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")

    def write_records(*changes):
        good = {"images": ["a.png"], "width": 10, "height": 10, "units": "pixels", "objects": [BOX, POLY, POLY]}
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(good | change) + "\n" for change in changes))
        return path

    return write_records


def test_records_and_objects_are_counted(write):
    found = survey(write({}, {"objects": []}, {}), AS_DECLARED)
    assert (found.records, found.objects, found.problems, found.whole) == (3, {"bbox": 2, "poly": 4}, [], True)


def test_every_broken_line_is_told_however_many(write):
    found = survey(write({}, *[{"width": 0}] * 50), AS_DECLARED)
    assert found.records == 1
    assert [problem.path.rpartition(":")[2] for problem in found.problems] == [f"{k} width" for k in range(2, 52)]


def test_missing_images_are_counted_once_each_and_the_first_few_named(write, tmp_path):
    found = survey(write({}, *[{"images": [f"{k // 2}.png"]} for k in range(20)]), AS_DECLARED)
    (problem,) = found.problems
    assert found.records == 21
    assert problem.value == [str(tmp_path / f"{k}.png") for k in range(5)]
    assert problem.rule == "10 images are missing"


def test_a_limit_reads_no_further_and_says_so(write):
    path = write({}, {}, {"width": 0})
    assert (survey(path, AS_DECLARED, 2).problems, survey(path, AS_DECLARED, 2).whole) == ([], False)
    assert survey(path, AS_DECLARED, 3).whole
    assert len(survey(path, AS_DECLARED, 3).problems) == 1


def test_each_line_is_told_as_it_is_read(write):
    path, told = write({}, {"width": 0}), []
    survey(path, AS_DECLARED, on_line=told.append)
    assert sum(len(line.text) for line in told) == path.stat().st_size


def test_a_file_without_records_and_one_that_cannot_be_read_are_told(write, tmp_path):
    assert "at least one record" in survey(write(), AS_DECLARED).problems[0].rule
    with pytest.raises(ConfigError, match="must be an existing JSONL file"):
        survey(tmp_path, AS_DECLARED)
