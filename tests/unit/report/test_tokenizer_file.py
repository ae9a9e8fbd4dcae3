"""A tokenizer that was read from its file alone encodes and decodes as the learner's does."""

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


def test_tiny_model_tokenizer_needs_no_transformers():
    assert isinstance(OURS, FileTokenizer)
    assert (len(OURS), OURS.get_vocab()) == (len(THEIRS), THEIRS.get_vocab())
    assert OURS.convert_tokens_to_ids(["<|coord_7|>"]) == THEIRS.convert_tokens_to_ids(["<|coord_7|>"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(PIECES, st.text(max_size=8))).map("".join))
def test_file_tokenizer_encodes_like_transformers(text):
    assert OURS.encode(text, add_special_tokens=False) == THEIRS.encode(text, add_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(THEIRS) - 1), max_size=12))
def test_file_tokenizer_decodes_like_transformers(ids):
    kept = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    assert OURS.decode(ids, **kept) == THEIRS.decode(ids, **kept)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_tokenizer_file_lacking_added_tokens_is_loaded_by_transformers(tmp_path, monkeypatch, file):
    shutil.copy(TINY_MODEL / "tokenizer.json", tmp_path)
    assert isinstance(load_tokenizer(tmp_path), FileTokenizer)
    lists = {
        "tokenizer_config.json": {"added_tokens_decoder": {"9999": {"content": "<|only_here|>"}}},
        "added_tokens.json": {"<|only_here|>": 9999},
    }
    (tmp_path / file).write_text(json.dumps(lists[file]))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder, **_: ("transformers", folder))
    assert load_tokenizer(tmp_path) == ("transformers", tmp_path)
