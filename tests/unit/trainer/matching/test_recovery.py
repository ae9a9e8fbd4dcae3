"""Missed objects that further answers found: which they are, what weighs more, and the loss that comes of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.learner.loss import loss_targets, stage2_loss, stage2_loss_from_hidden
from stage2_trainer.matching.assign import MatchOptions
from stage2_trainer.matching.ground_truth import GroundTruth, object_entries, serialize_objects
from stage2_trainer.matching.masks import concatenate, packed_supervision, segment_meta, supervision
from stage2_trainer.matching.targets import build_target
from tests.unit.trainer.matching.strategies import objects, vocabs
from tests.unit.trainer.matching.test_variants import CAT, DOG, NOISE, OWL, VARIANTS, shifted

PROMPT = [1, 1]


def target_of(vocab, answered, gt, *further, **options):
    answers = [vocab.encode(serialize_objects(one)) for one in further]
    ids, truth = vocab.encode(serialize_objects(answered)), GroundTruth(tuple(gt))
    return build_target(ids, truth, vocab, MatchOptions(**options), further=answers)


def masks(vocab, target):
    ids = [*PROMPT, *target.y_train_ids, 2]
    return supervision(segment_meta(target, PROMPT, encoded_len=len(ids)), ids, vocab), ids


def weighed(vocab, target, factor):
    """The text of `Y_train` with only the tokens whose loss has this factor, coordinates included."""
    places = [at for at, weight in (*target.weights, *target.coord_weights) if weight == factor]
    pieces = vocab.align(list(target.y_train_ids)).pieces
    return "".join(pieces[at] for at in sorted(places))


def test_a_missed_object_that_a_further_answer_found_weighs_more(any_vocab):
    answered, gt = [CAT], [CAT, DOG, OWL]
    target = target_of(any_vocab, answered, gt, [NOISE], [shifted(OWL, 5), CAT], missed_desc_weight=1.0)
    assert target.recovered == (2,)
    assert target.counters["misses_recovered"] == 1
    # Whole tokens: one that reaches over an entry's edge belongs to the entry in which it begins.
    text = weighed(any_vocab, target, 2.0)
    assert text in ", " + object_entries([OWL], 3) + "}"
    assert 'object_3": {"desc": "owl"' in text
    assert {at for at, _ in target.coord_weights} < set(target.coord_targets)
    assert [target.coord_targets[at] for at, _ in target.coord_weights] == list(OWL.bins)


def test_factors_of_name_and_recovery_multiply_and_a_silent_name_stays_silent(any_vocab):
    options = {"recovery_weight": 3.0}
    named = target_of(any_vocab, [], [CAT], [CAT], missed_desc_weight=1.5, **options)
    assert "cat" in weighed(any_vocab, named, 4.5)
    silent = target_of(any_vocab, [], [CAT], [CAT], **options)
    assert "cat" not in weighed(any_vocab, silent, 3.0)
    assert weighed(any_vocab, silent, 3.0).count("coord") == 4
    assert silent.tail_ignore_pos


@pytest.mark.parametrize("further", [(), ([],), ([NOISE],), ([CAT], [CAT, NOISE])])
def test_without_anything_found_the_target_is_the_plain_one(any_vocab, further):
    plain = target_of(any_vocab, [CAT], [CAT, DOG])
    found = target_of(any_vocab, [CAT], [CAT, DOG], *further, recovery_weight=7.0)
    assert found == plain
    assert masks(any_vocab, found)[0].coord_weights is None


def test_further_answers_are_matched_as_the_first_one_is(any_vocab):
    near = [shifted(DOG, 12)]
    assert target_of(any_vocab, [], [DOG], near).recovered == (0,)
    assert target_of(any_vocab, [], [DOG], near, maskiou_gate=0.99).recovered == ()
    # The second lies on the true one, but repeats the first, which does not reach the gate.
    twice = [shifted(DOG, 60), DOG]
    assert target_of(any_vocab, [], [DOG], twice, maskiou_gate=0.7).recovered == (0,)
    assert target_of(any_vocab, [], [DOG], twice, maskiou_gate=0.7, duplicate_iou=0.4).recovered == ()


@given(objects, objects, objects, vocabs, VARIANTS, st.data())
@settings(max_examples=80, deadline=None)
def test_of_every_variant_just_the_recovered_objects_weigh_more(pred, gt, other, vocab, variant, data):
    ids = vocab.encode(serialize_objects(pred))
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    options = MatchOptions(maskiou_resolution=64, ot_iters=2, maskiou_gate=0.05, recovery_weight=5.0, **variant)
    further = [vocab.encode(serialize_objects(one)) for one in (other, gt[: len(gt) // 2])]
    plain = build_target(ids, GroundTruth(tuple(gt)), vocab, options)
    target = build_target(ids, GroundTruth(tuple(gt)), vocab, options, further=further)
    assert set(target.recovered) <= set(target.false_negatives)
    assert replace(target, weights=plain.weights, coord_weights=(), recovered=()) == plain
    bins = sorted(target.coord_targets[at] for at, _ in target.coord_weights)
    assert bins == sorted(one for i in target.recovered for one in gt[i].bins)
    before = dict(plain.weights)
    for at, weight in target.weights:
        assert weight in (before.get(at), 5.0 * before.get(at, 1.0))
        assert target.labels[at] in ("ce", "penalised")


@pytest.fixture
def packed(vocab):
    """Masks of a row of two segments, only the second of which has recovered misses, and the row's ids."""
    plain = target_of(vocab, [CAT], [CAT, DOG])
    more = target_of(vocab, [CAT], [CAT, DOG, OWL], [OWL], recovery_weight=2.5)
    rows = [[*PROMPT, *one.y_train_ids, 2] for one in (plain, more)]
    metas = [segment_meta(one, PROMPT, encoded_len=len(ids)) for one, ids in zip((plain, more), rows, strict=True)]
    alone = [supervision(meta, ids, vocab) for meta, ids in zip(metas, rows, strict=True)]
    return packed_supervision(metas, [*rows[0], *rows[1]], vocab), alone, rows


def test_masks_of_a_row_are_those_of_its_segments(packed):
    row, alone, rows = packed
    expected = concatenate(alone, [0, len(rows[0])], len(rows[0]) + len(rows[1]))
    np.testing.assert_array_equal(row.coord_weights, expected.coord_weights)
    assert alone[0].coord_weights is None
    count = len(alone[0].coord_targets)
    assert set(row.coord_weights[:count]) == {1.0}
    np.testing.assert_array_equal(row.coord_weights[count:], alone[1].coord_weights)
    assert sorted(alone[1].coord_weights) == [1.0] * 8 + [2.5] * 4


def test_the_loss_is_the_mean_of_each_positions_own_times_its_factor(packed, vocab):
    row, _, _ = packed
    targets = loss_targets(row)
    rng = torch.Generator().manual_seed(3)
    coord_ids = torch.tensor([vocab.encode(f"<|coord_{k}|>")[0] for k in range(1000)])
    size = max(int(coord_ids.max()), int(targets.labels.max())) + 1
    hidden = torch.randn(len(targets.positions), 6, generator=rng, dtype=torch.float64)
    weight = torch.randn(size, 6, generator=rng, dtype=torch.float64)
    options = RolloutMatching()
    split = len(targets.labels)
    alone = replace(targets, weights=None, coord_weights=None, ce_denominator=1.0, coord_denominator=1.0)

    def one(index):
        """The loss of a single position, by the plain path."""
        words, places = [index] if index < split else [], [index - split] if index >= split else []
        part = replace(
            alone, positions=targets.positions[[index]], labels=targets.labels[words], bins=targets.bins[places],
            in_prefix=targets.in_prefix[places], prefix_count=int(targets.in_prefix[places].sum()),
        )  # fmt: skip
        return stage2_loss(hidden[[index]] @ weight.T, part, coord_ids, options).total

    factors = [*targets.weights.tolist(), *targets.coord_weights.tolist()]
    each = [one(index) * factor for index, factor in enumerate(factors)]
    expected = torch.stack(each[:split]).mean() + torch.stack(each[split:]).mean()
    whole = stage2_loss(hidden @ weight.T, targets, coord_ids, options)
    torch.testing.assert_close(whole.total, expected)
    leaf = hidden.clone().requires_grad_()
    portions = stage2_loss_from_hidden(leaf, weight, targets, coord_ids, options, chunk_elements=3 * size)
    torch.testing.assert_close(portions.total, expected)
    (found,) = torch.autograd.grad(portions.total, leaf)
    other = hidden.clone().requires_grad_()
    torch.testing.assert_close(
        found, torch.autograd.grad(stage2_loss(other @ weight.T, targets, coord_ids, options).total, other)[0]
    )
    words, coords = targets.parts()
    sums = stage2_loss(hidden[:split] @ weight.T, words, coord_ids, options).ce
    rest = stage2_loss(hidden[split:] @ weight.T, coords, coord_ids, options).coord
    torch.testing.assert_close(sums / targets.ce_denominator + rest / targets.coord_denominator, expected)
