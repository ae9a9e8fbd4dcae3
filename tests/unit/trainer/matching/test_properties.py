"""What holds for every answer and every ground truth, by random search and by one answer damaged in every way."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_trainer.matching.assign import MatchOptions
from stage2_trainer.matching.ground_truth import GroundTruth, GTObject, serialize_objects
from stage2_trainer.matching.masks import packed_supervision, segment_meta, supervision
from stage2_trainer.matching.parse import END_OF_TURN, parse_rollout
from stage2_trainer.matching.targets import build_target
from tests.unit.trainer.matching.strategies import objects, vocabs

pytestmark = pytest.mark.in_turns(3, apart=True)

QUICK = MatchOptions(maskiou_resolution=64, ot_iters=2)
several = settings(max_examples=80, deadline=None)


@given(objects, vocabs, st.integers(1, 50))
@several
def test_serialized_objects_are_recovered_by_parsing(gt, vocab, start_index):
    parsed = parse_rollout(vocab.encode(serialize_objects(gt, start_index) + END_OF_TURN), vocab)
    assert [(one.desc, one.kind, one.bins) for one in parsed.valid_objects] == [(g.desc, g.kind, g.bins) for g in gt]
    assert [one.index for one in parsed.objects] == list(range(start_index, start_index + len(gt)))
    assert parsed.clean
    assert not parsed.truncated


def check_target(response, gt, vocab):
    """Promises that hold for any response; returns the target."""
    target = build_target(response, GroundTruth(tuple(gt)), vocab, QUICK)
    parsed = target.parsed
    if parsed.clean:
        assert isinstance(json.loads(target.y_train_text), dict)
    kept = list(parsed.prefix_ids)
    if parsed.prefix_text != "{" or kept != vocab.encode("{"):
        shared = next(
            (i for i, (a, b) in enumerate(zip(kept, response, strict=False)) if a != b), min(len(kept), len(response))
        )
        assert vocab.align(kept).text == parsed.prefix_text
        # All that differs is spelled from within one token of the response.
        assert vocab.decode_piece(response[min(shared, len(response) - 1)]).startswith(vocab.decode(kept[shared:]))
    assert all(0 <= position < target.train_len for position in target.coord_targets)
    assert set(target.false_negatives) | {pair.gt for pair in target.matching.pairs} == set(range(len(gt)))
    return target


@given(objects, objects, vocabs, st.data())
@several
def test_any_truncated_answer_gives_valid_target(pred, gt, vocab, data):
    ids = vocab.encode(serialize_objects(pred) + END_OF_TURN)
    target = check_target(ids[: data.draw(st.integers(0, len(ids)))], gt, vocab)
    assert target.parsed.clean


@given(objects, objects, vocabs, st.randoms(use_true_random=False))
@several
def test_any_damaged_token_ids_give_valid_target(pred, gt, vocab, rng: random.Random):
    ids = vocab.encode(serialize_objects(pred) + END_OF_TURN)
    for _ in range(rng.randint(1, 4)):
        where = rng.randint(0, len(ids))
        ids[where : where + rng.randint(0, 2)] = [rng.randrange(vocab.size) for _ in range(rng.randint(0, 3))]
    check_target(ids, gt, vocab)


@given(objects, objects, vocabs, st.randoms(use_true_random=False))
@several
def test_any_damaged_bytes_give_valid_target(pred, gt, vocab, rng: random.Random):
    data = bytearray(serialize_objects(pred).encode())
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] = rng.choice(b'{}[]",:\\ a\xc3\xff')
    check_target(vocab.encode(data.decode(errors="replace")), gt, vocab)


@given(st.lists(st.integers(-5, 1320), max_size=60), vocabs)
@several
def test_any_token_ids_can_be_parsed(ids, vocab):
    parsed = parse_rollout(ids, vocab)
    assert vocab.align(list(parsed.prefix_ids)).text == parsed.prefix_text


@given(st.lists(st.tuples(objects, objects), min_size=1, max_size=4), vocabs, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_packed_masks_equal_concatenated_unpacked_masks(samples, vocab, padding):
    metas, rows, alone = [], [], []
    for k, (pred, gt) in enumerate(samples):
        target = build_target(vocab.encode(serialize_objects(pred)), GroundTruth(tuple(gt)), vocab, QUICK)
        prompt = list(range(3 + k))
        row = [*prompt, *target.y_train_ids, 2, 5]
        metas.append(segment_meta(target, prompt, encoded_len=len(row)))
        alone.append(supervision(metas[-1], row, vocab))
        rows.append(row)
    packed = packed_supervision(metas, [*chain.from_iterable(rows), *[0] * padding], vocab)
    offsets = np.cumsum([0, *map(len, rows)])[:-1]
    expected_labels = np.concatenate([*(one.labels for one in alone), np.full(padding, -100)])
    np.testing.assert_array_equal(packed.labels, expected_labels)
    moved = [one.coord_positions + offset for one, offset in zip(alone, offsets, strict=True)]
    np.testing.assert_array_equal(packed.coord_positions, np.concatenate(moved))
    np.testing.assert_array_equal(packed.coord_targets, np.concatenate([one.coord_targets for one in alone]))
    for meta, one in zip(metas, alone, strict=True):
        supervised = np.concatenate([np.flatnonzero(one.labels != -100), one.coord_positions])
        assert supervised.min() >= meta.prompt_len
        assert supervised.max() == meta.prompt_len + meta.train_len + meta.end_of_turn_len - 1


SAID = [GTObject("red box", "bbox", (1, 2, 30, 40)), GTObject("dög", "poly", (1, 2, 30, 4, 5, 60))]
TRUTH = [GTObject("red box", "bbox", (1, 2, 31, 41))]
ANSWER = serialize_objects(SAID) + END_OF_TURN
STRUCTURE = '{}[]":,\\'
ODD = (
    "\0",
    "\u202e",
    "\ufffd",
    "\U0001f600",
    "<|im_end|>",
    "<|im_start|>",
    "<|coord_1000|>",
    "<|coord_5|>",
    '"}}',
    "{" * 99,
)
PLACES = range(len(ANSWER))

FAMILIES: dict[str, Callable[[], Iterator[str]]] = {
    "cut off after each character": lambda: (ANSWER[:at] for at in PLACES),
    "begun at each character": lambda: (ANSWER[at:] for at in PLACES),
    "without each character": lambda: (ANSWER[:at] + ANSWER[at + 1 :] for at in PLACES),
    "each character twice": lambda: (ANSWER[:at] + ANSWER[at] + ANSWER[at:] for at in PLACES),
    "another sign of JSON in each place": lambda: (
        ANSWER[:at] + sign + ANSWER[at + 1 :] for at in PLACES for sign in STRUCTURE
    ),
    "something odd before each character": lambda: (ANSWER[:at] + odd + ANSWER[at:] for at in PLACES for odd in ODD),
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_damaged_answer_gives_valid_target(vocab, family: Callable[[], Iterator[str]]) -> None:
    cases = 0
    for text in family():
        check_target(vocab.encode(text), TRUTH, vocab)
        cases += 1
    assert cases >= len(ANSWER)
