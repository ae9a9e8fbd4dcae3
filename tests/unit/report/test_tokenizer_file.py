"""A tokenizer read from its file alone spells and tokenises as the learner's does."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from stage2_report.tokenizer_file import FileTokenizer, load_tokenizer
from tests.unit.report.inspected import TINY_MODEL

OURS, THEIRS = load_tokenizer(TINY_MODEL), AutoTokenizer.from_pretrained(TINY_MODEL)
PIECES = st.sampled_from(["<|coord_12|>", "<|coord_", "<|im_end|>", "<|image_pad|>", '{"desc": "', "  ", "\n"])


def test_the_tiny_model_needs_no_transformers():
    assert isinstance(OURS, FileTokenizer)
    assert (len(OURS), OURS.get_vocab()) == (len(THEIRS), THEIRS.get_vocab())
    assert OURS.convert_tokens_to_ids(["<|coord_7|>"]) == THEIRS.convert_tokens_to_ids(["<|coord_7|>"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(PIECES, st.text(max_size=8))).map("".join))
def test_text_has_the_same_ids(text):
    assert OURS.encode(text, add_special_tokens=False) == THEIRS.encode(text, add_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(THEIRS) - 1), max_size=12))
def test_ids_have_the_same_text(ids):
    kept = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    assert OURS.decode(ids, **kept) == THEIRS.decode(ids, **kept)


CHANGES = {
    "another class, which may change the file": {"tokenizer_class": "LlamaTokenizer"},
    "a token that the file lacks": {"extra_special_tokens": ["<|only_here|>"]},
    "a token by id that the file lacks": {"added_tokens_decoder": {"9999": {"content": "<|only_here|>"}}},
    "an end of turn that the file lacks": {"eos_token": {"content": "<|only_here|>"}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_file_does_not_say_is_left_to_transformers(tmp_path, monkeypatch, change):
    shutil.copy(TINY_MODEL / "tokenizer.json", tmp_path)
    config = json.loads((TINY_MODEL / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | change))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder, **_: ("transformers", folder))
    assert load_tokenizer(tmp_path) == ("transformers", tmp_path)
