"""Answers that repeat themselves end, each for itself."""

from __future__ import annotations

import pytest
import torch

from stage2_api.rollout_matching import RepeatTerminate
from stage2_trainer.rollouts.hf import RepeatTermination, holds_objects, repeats

PIECES = {0: "<end>", 1: '{"', 2: "object_", 3: "1", 4: '": 0, "', 5: "x"}
END = 0


def rules(**keys):
    quiet = {"max_consecutive_token_repeats": 0, "ngram_size": 64, "min_new_tokens": 0}
    return RepeatTerminate(enabled=True, **{**quiet, **keys})


@pytest.mark.parametrize(
    ("answer", "keys", "ends"),
    [
        ([5, 5, 5], {"max_consecutive_token_repeats": 3}, True),
        ([5, 1, 5, 5], {"max_consecutive_token_repeats": 3}, False),
        ([5] * 100, {"max_consecutive_token_repeats": 0}, False),
        ([7, 1, 2, 1, 2], {"ngram_size": 2}, True),
        ([1, 2, 1, 2, 7], {"ngram_size": 2}, False),
        ([1, 2, 1, 2], {"ngram_size": 2, "ngram_repeats": 3}, False),
        ([1, 2, 1, 2, 1, 2], {"ngram_size": 2, "ngram_repeats": 3}, True),
        ([], {"ngram_size": 1}, False),
    ],
)
def test_a_repetition_is_told_from_what_only_resembles_one(answer, keys, ends):
    assert repeats(answer, rules(**keys)) is ends


def test_object_keys_are_counted_in_the_text_whatever_the_pieces():
    one = [1, 2, 3, 4, 2, 3]
    assert not holds_objects(one, 3, PIECES.__getitem__)
    assert holds_objects(one, 2, PIECES.__getitem__)
    assert not holds_objects([*one, *[5] * 8], 2, PIECES.__getitem__), "the second key is no news any more"


def end_scores(processor, rows):
    return processor(torch.tensor(rows), torch.zeros(len(rows), 6))


def test_only_the_row_that_repeats_is_left_nothing_but_the_end():
    processor = RepeatTermination(rules(max_consecutive_token_repeats=2), 1, END, PIECES.__getitem__)
    scores = end_scores(processor, [[9, 5, 5], [9, 1, 2], [9, 0, 0]])
    assert scores[0].tolist() == [0.0] + [-torch.inf] * 5
    assert scores[1:].tolist() == [[0.0] * 6] * 2
    assert processor.ended == {0}


def test_no_answer_is_looked_at_before_its_minimum():
    processor = RepeatTermination(rules(max_consecutive_token_repeats=2, min_new_tokens=3), 1, END, PIECES.__getitem__)
    assert end_scores(processor, [[9, 5, 5]]).tolist() == [[0.0] * 6]
    assert end_scores(processor, [[9, 5, 5, 5]])[0, 1:].tolist() == [-torch.inf] * 5
