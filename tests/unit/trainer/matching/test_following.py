"""Which boxes follow a true one that is still free, and which figures count them."""

from dataclasses import replace

import pytest

from stage2_trainer.matching.ground_truth import GTObject
from tests.unit.trainer.matching.test_variants import CAT, DOG, NOISE, OWL, shifted, target_of

SQUARE = GTObject("cat", "poly", (100, 100, 300, 100, 300, 300, 100, 300))


def pairs(target):
    return [(pair.pred, pair.gt) for pair in target.matching.pairs]


def test_duplicate_box_is_not_assigned_to_free_ground_truth(any_vocab):
    target = target_of(any_vocab, [shifted(CAT, 5), CAT], [CAT, OWL], assignment="dynamic", duplicate_iou=0.9)
    assert pairs(target) == [(0, 0)]
    assert target.matching.following == ()
    assert (target.false_negatives, target.appended) == ((1,), (1,))


@pytest.mark.parametrize(("answered", "truth"), [([CAT, NOISE], [SQUARE, DOG]), ([SQUARE, NOISE], [CAT, DOG])])
def test_dynamic_assignment_leaves_unmatched_boxes_alone_beside_polygons(any_vocab, answered, truth):
    target = target_of(any_vocab, answered, truth, assignment="dynamic")
    assert pairs(target) == [(0, 0)]
    assert target.matching.following == ()
    assert (target.false_negatives, target.appended) == ((1,), (1,))


def test_box_that_passes_gate_counts_as_matched_despite_low_iou(any_vocab):
    near = replace(CAT, bins=(180, 100, 380, 300))  # an overlap of 0.43, where the gate is 0.3
    target = target_of(any_vocab, [near, NOISE], [CAT, DOG], assignment="dynamic")
    assert (pairs(target), [(one.pred, one.gt) for one in target.matching.following]) == ([(0, 0)], [(1, 1)])
    assert (target.false_negatives, target.appended) == ((1,), ())
    assert target.counters["matched_pairs"] == 1
    assert target.counters["matched_maskiou_sum"] == pytest.approx(0.43, abs=0.02)
