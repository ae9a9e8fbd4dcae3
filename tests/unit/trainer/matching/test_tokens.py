"""Token pieces and coordinate tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from stage2_api.coordinates import coord_bin, coord_token, to_bin
from stage2_trainer.matching.tokens import CoordVocab, cut_before, vision_ids


def test_every_bin_has_its_token(vocab):
    assert [vocab.bin_of(token_id) for token_id in vocab.ids] == list(range(1000))
    assert vocab.decode_piece(int(vocab.ids[7])) == "<|coord_7|>"


def test_other_ids_have_no_bin(vocab):
    assert vocab.bin_of(0) is None
    assert vocab.bin_of(-1) is None
    assert vocab.bin_of(10**9) is None


def test_bins_of_array_equal_bins_of_single_ids(vocab):
    ids = np.array([0, vocab.ids[0], vocab.ids[999], -5, 10**9])
    assert vocab.bins_of(ids).tolist() == [-1, 0, 999, -1, -1]


@pytest.mark.parametrize("text", ["<|coord_1000|>", "<|coord_01|>", "<|coord_|>", "<|coord_*|>", " <|coord_1|>", "1"])
def test_only_exact_coordinate_token_text_names_bin(text):
    assert coord_bin(text) is None


def test_coordinate_token_and_bin_are_inverse():
    assert [coord_bin(coord_token(k)) for k in range(1000)] == list(range(1000))


def test_tokenizer_without_coordinate_tokens_is_refused():
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), unk_token="a")
    with pytest.raises(ValueError, match=r"<\|coord_0\|> is not one token.*stage2 prepare"):
        CoordVocab.from_tokenizer(bare)


def test_repeated_coordinate_ids_are_refused(vocab):
    with pytest.raises(ValueError, match="1000 distinct ids"):
        CoordVocab(np.zeros(1000, dtype=np.int64), vocab.decode, vocab.encode, vocab.size)


def test_character_split_over_tokens_belongs_to_token_that_completes_it(vocab):
    ids = vocab.encode("aé☃😀b")
    aligned = vocab.align(ids)
    assert aligned.text == "aé☃😀b"
    assert "".join(aligned.pieces) == aligned.text
    assert aligned.pieces[0] == "a"
    assert [i for i in range(len(ids)) if i in aligned.split] == [1, 3, 4, 6, 7, 8]


def test_invalid_bytes_stay_with_their_own_tokens(vocab):
    lone = vocab.encode("é")[1]  # a continuation byte
    aligned = vocab.align([*vocab.encode("ab"), lone, lone, *vocab.encode('"}')])
    assert aligned.text == 'ab\ufffd\ufffd"}'
    assert aligned.pieces[-1] == vocab.decode_piece(vocab.encode('"}')[-1])
    assert aligned.split == frozenset()


def test_answer_may_stop_inside_character(vocab):
    aligned = vocab.align(vocab.encode("a😀")[:3])
    assert aligned.text == "a\ufffd"
    assert aligned.starts[-1] == len(aligned.text)


def test_token_at_character_skips_tokens_without_text(vocab):
    aligned = vocab.align(vocab.encode("é!"))
    assert aligned.token_at(0) == 1
    assert aligned.token_at(1) == 2


def test_last_pixel_edge_falls_into_last_bin():
    assert (to_bin(0, 96), to_bin(48, 96), to_bin(96, 96)) == (0, 500, 999)


def test_answer_is_cut_before_each_vision_token():
    ids = {"<|image_pad|>": 5, "<|video_pad|>": 6, "<|vision_start|>": 7, "<|vision_end|>": 8, "a": 1}
    ends = vision_ids(SimpleNamespace(get_vocab=lambda: ids))
    assert [cut_before([1, end, 1], ends) for end in (5, 6, 7, 8)] == [[1]] * 4
    assert cut_before([1, 1], ends) == [1, 1]
