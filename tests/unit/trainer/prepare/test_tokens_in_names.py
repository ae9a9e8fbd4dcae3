"""A name that spells a token of the vocabulary would be read as that token: its objects are left out, and counted."""

import pytest

from stage2_trainer.data.records import load_records
from stage2_trainer.matching.ground_truth import holds_token
from stage2_trainer.prepare import record_writer
from tests.unit.trainer.prepare.odd_sets import import_yolo, yolo
from tiny_model.tokenizer import build_tokenizer


@pytest.mark.parametrize("name", ["a<|coord_5|>b", "cat<|im_end|>", "<|image_pad|>"])
def test_an_object_of_such_a_name_is_left_out_and_counted(tmp_path, name):
    labels = {"a.png": "0 0.35 0.3 0.5 0.4\n1 0.5 0.5 0.5 0.5"}
    found = import_yolo(tmp_path, yolo(tmp_path, labels, names=[name, "dog"]))
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
