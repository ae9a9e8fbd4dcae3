"""Supervision masks beyond the golden vectors: weights, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from stage2_trainer.matching.masks import SegmentMeta, packed_supervision, supervision
from stage2_trainer.matching.tokens import MatchingError

META = SegmentMeta(
    prompt_ids=(1, 1, 1, 1, 1),
    prefix_len=3,
    train_len=6,
    end_of_turn_len=0,
    encoded_len=12,
    prefix_coord_pos=(1,),
    prefix_coord_target_bins=(77,),
    tail_ignore_pos=(),
)


@pytest.fixture
def ids(vocab):
    return [1] * 5 + [2, int(vocab.ids[3]), 2] + [4, int(vocab.ids[500]), 5] + [6]


def test_ignored_tail_positions_have_no_loss_of_any_kind(vocab, ids):
    found = supervision(replace(META, tail_ignore_pos=(0, 1)), ids, vocab)
    assert np.flatnonzero(found.labels != -100).tolist() == [10]
    assert found.coord_positions.tolist() == [6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prompt_ids": (1, 1, 9, 1, 1)},
            r"prompt tokenization mismatch: 1 of 5 .* position 2 \(rollout engine 9, learner 1\)",
        ),
        ({"encoded_len": 13}, "12 ids; meta data say 13"),
        ({"prompt_ids": (1,) * 12}, "12 tokens encoded, 12 of them prompt"),
        ({"prompt_ids": ()}, "must follow a prompt"),
        ({"train_len": 8}, "lie inside the segment"),
        ({"prefix_len": 7}, "lie inside the segment"),
        ({"end_of_turn_len": 2}, "lie inside the segment"),
        ({"prefix_coord_pos": (3,)}, r"prefix_coord_pos: 3..3; must lie in 0..2"),
        ({"tail_ignore_pos": (-1,)}, r"tail_ignore_pos: -1..-1; must lie in 0..2"),
        ({"prefix_coord_target_bins": ()}, "1 positions, 0 targets"),
    ],
)
def test_metadata_contradicting_token_ids_are_refused(vocab, ids, change, message):
    with pytest.raises(MatchingError, match=message):
        supervision(replace(META, **change), ids, vocab)


def test_segments_longer_than_their_row_are_refused(vocab, ids):
    with pytest.raises(MatchingError, match="must fit the row"):
        packed_supervision([META, META], ids, vocab)


def test_row_without_segments_has_no_supervision(vocab):
    found = packed_supervision([], [0, 0], vocab)
    assert found.labels.tolist() == [-100, -100]
    assert len(found.coord_positions) == 0


def test_token_weights_keep_their_tokens_in_packed_row(vocab, ids):
    weighted = replace(META, weights=((2, -0.5), (3, 1.5)))
    found = packed_supervision([META, weighted], [*ids, *ids], vocab)
    assert supervision(META, ids, vocab).weights is None
    assert found.labels[12 + 7] == ids[7]  # a token of the prefix, which is taught against
    assert np.flatnonzero(found.weights != 1).tolist() == [12 + 7, 12 + 8]
    assert found.weights[[12 + 7, 12 + 8]].tolist() == [-0.5, 1.5]
