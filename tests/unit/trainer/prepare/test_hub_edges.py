"""Edges of data sets of Hugging Face, and of outlines that return to where they began."""

import datasets
import pytest

from stage2_trainer.prepare import annotations
from stage2_trainer.prepare.hugging_face import HubChoice
from tests.unit.trainer.prepare.test_coco import DataSet, annotation, bins
from tests.unit.trainer.prepare.test_hugging_face import BINS, LABELS, encoded, features, imported, row, saved

INTEGERS = datasets.Value("int64")


@pytest.mark.parametrize(("kind", "number"), [(LABELS, -1), (INTEGERS, -1), (INTEGERS, 2)])
def test_category_number_without_name_is_left_out(tmp_path, kind, number):
    """-1 is how `datasets` writes that an object has no label."""
    source = saved(tmp_path, row([(10, 20, 50, 50)] * 2, (number, 1)), form=features(kind))
    found = imported(tmp_path, source, HubChoice("coco", names=("cat", "dog")))
    assert (found.objects, found.counts) == ([("dog", BINS)], {annotations.NO_CATEGORY: 1})


@pytest.mark.parametrize("key", ["iscrowd", "is_crowd"])
def test_crowd_is_left_out_under_either_column_name(tmp_path, key):
    one = {"bbox": datasets.List(datasets.Value("float64")), "category": LABELS, key: datasets.Value("int64")}
    form = datasets.Features({"image": datasets.Image(), "objects": datasets.List(one)})
    objects = [{"bbox": [10, 20, 50, 50], "category": 0, key: crowd} for crowd in (0, 1)]
    found = imported(tmp_path, saved(tmp_path, {"image": encoded(), "objects": objects}, form=form))
    assert (found.objects, found.counts) == ([("cat", BINS)], {annotations.CROWD: 1})


def test_closed_outline_drops_repeated_first_point(tmp_path):
    closed = [10, 10, 60, 10, 60, 60, 10, 10]
    (record,) = DataSet(tmp_path, [annotation(1, segmentation=[closed])]).records(geometry="poly")
    points = bins(record["objects"][0])
    assert sorted(zip(points[::2], points[1::2], strict=True)) == [(100, 50), (600, 50), (600, 300)]
