"""A name that spells a token of the vocabulary would be read as that token: its objects are left out, and counted."""

import datasets
import pytest

from stage2_trainer.data.records import load_records
from stage2_trainer.matching.ground_truth import holds_token
from stage2_trainer.prepare import record_writer
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.hugging_face import HubChoice, read_hub
from tests.unit.trainer.prepare import odd_sets
from tests.unit.trainer.prepare.odd_sets import Imported, import_voc, import_yolo, voc_object
from tests.unit.trainer.prepare.test_coco import DataSet, annotation
from tests.unit.trainer.prepare.test_hugging_face import features, row, saved
from tiny_model.tokenizer import build_tokenizer

NAMES = ["a<|coord_5|>b", "cat<|im_end|>", "<|image_pad|>"]


def from_coco(folder, name):
    categories = [{"id": 3, "name": name}, {"id": 18, "name": "dog"}]
    data = DataSet(folder, [annotation(1), annotation(2, category=18)], categories=categories)
    data.records()
    data.output.unlink()
    return Imported(data.output, lambda tally: read_coco(data.file, data.images, tally))


def from_yolo(folder, name):
    labels = {"a.png": "0 0.35 0.3 0.5 0.4\n1 0.5 0.5 0.5 0.5"}
    return import_yolo(folder, odd_sets.yolo(folder, labels, names=[name, "dog"]))


def from_voc(folder, name):
    escaped = name.replace("<", "&lt;").replace(">", "&gt;")
    return import_voc(folder, odd_sets.voc(folder / "voc", {"a": voc_object(escaped) + voc_object("dog")}))


def from_hub(folder, name):
    both = row([(10, 20, 50, 50)] * 2, (name, "dog"))
    source = saved(folder, both, form=features(datasets.Value("string")))
    return Imported(folder / "out" / "x.jsonl", lambda tally: read_hub(str(source), HubChoice("coco"), tally))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("read", [from_coco, from_yolo, from_voc, from_hub])
def test_an_object_of_such_a_name_is_left_out_and_counted(tmp_path, read, name):
    found = read(tmp_path, name)
    assert [desc for desc, _ in found.objects] == ["dog"]
    assert found.counts == {record_writer.TOKEN_IN_DESC: 1}
    assert len(load_records(found.output)[0].objects) == 1


def test_every_special_token_of_the_stock_vocabulary_is_met_by_the_rule():
    tokenizer = build_tokenizer(7, plain=False)
    special = [one.content for one in tokenizer.added_tokens_decoder.values() if one.special]
    assert {"<|im_end|>", "<|image_pad|>"} <= {*special}
    assert all(holds_token(f"a{token}b") for token in special)


@pytest.mark.parametrize("name", ["a < b | c > d", "<|>", "<| |>", "<cat>", "a|b", "|coord_5|"])
def test_other_names_with_these_characters_are_names(name):
    assert not holds_token(name)
