"""Candidates and assignment against the plain definitions; fixed cases are golden vectors."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.matching.assign import MatchOptions, assign, candidate_pairs, match
from stage2_trainer.matching.geometry import aabbs
from tests.unit.trainer.matching.strategies import box, objects


def candidates_of_one(pred, gt, k):
    """The rule as a loop: positive overlaps by (-IoU, index), then the others by (squared centre distance, index)."""
    overlapping, apart = [], []
    for j, other in enumerate(gt):
        width = min(pred[2], other[2]) - max(pred[0], other[0])
        height = min(pred[3], other[3]) - max(pred[1], other[1])
        shared = max(width, 0) * max(height, 0)
        union = sum((one[2] - one[0]) * (one[3] - one[1]) for one in (pred, other)) - shared
        if shared > 0:
            overlapping.append((-shared / union, j))
        else:
            dx = pred[0] + pred[2] - other[0] - other[2]
            dy = pred[1] + pred[3] - other[1] - other[3]
            apart.append((dx * dx + dy * dy, j))
    return [j for _, j in sorted(overlapping) + sorted(apart)][:k]


@given(objects, objects, st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_candidate_pairs_equal_plain_loop(pred, gt, k):
    p, g = aabbs(pred).tolist(), aabbs(gt).tolist()
    expected = [[i, j] for i in range(len(p)) for j in candidates_of_one(p[i], g, k)]
    assert candidate_pairs(aabbs(pred), aabbs(gt), k).tolist() == expected


def test_pair_cost_is_one_minus_iou():
    (pair,) = match([box(0, 0, 999, 999)], [box(0, 0, 999, 500)]).pairs
    assert (pair.iou, pair.cost) == (0.5, 0.5)
    (pair,) = match([box(100, 100, 200, 200)], [box(110, 110, 210, 210)]).pairs
    assert (pair.iou, pair.cost) == pytest.approx((0.685233, 1 - 0.685233), abs=1e-6)


def test_objects_outside_candidates_cannot_match():
    gt = [box(0, 0, 500, 500), box(0, 0, 490, 500)]
    result = match([box(0, 0, 499, 500), box(0, 0, 500, 500)], gt, MatchOptions(candidate_top_k=1))
    assert result.candidates == 2
    assert len(result.pairs) == 1


@given(objects, objects, st.data())
@settings(max_examples=100, deadline=None)
def test_permuting_ground_truth_keeps_total_cost(pred, gt, data):
    options = MatchOptions(maskiou_gate=0.1, maskiou_resolution=64, candidate_top_k=8)
    order = data.draw(st.permutations(range(len(gt))))
    plain, permuted = match(pred, gt, options), match(pred, [gt[j] for j in order], options)

    def total(result):
        left_over = len(result.false_positives) + len(result.false_negatives)
        return sum(pair.cost for pair in result.pairs) + left_over

    assert total(permuted) == pytest.approx(total(plain))
    assert permuted.gating_rejections == plain.gating_rejections


def test_permuting_ground_truth_permutes_match():
    gt = [box(100 * i, 0, 100 * i + 90 - 5 * i, 90) for i in range(8)]
    pred = [box(100 * i + 3, 2, 100 * i + 92, 88) for i in range(8)]
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    plain = {(pair.pred, pair.gt, pair.iou) for pair in match(pred, gt).pairs}
    permuted = {(pair.pred, order[pair.gt], pair.iou) for pair in match(pred, [gt[j] for j in order]).pairs}
    assert plain == permuted
    assert len(plain) == 8


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_assignment_with_unmatched_costs_is_optimal(rows, columns, seed):
    """Against the reduced problem: choose pairs that save most, each saving fp_cost + fn_cost - cost."""
    rng = np.random.default_rng(seed)
    costs = np.where(rng.random((rows, columns)) < 0.7, rng.random((rows, columns)) * 2, np.nan)
    i, j = assign(costs, fp_cost=0.5, fn_cost=0.8)
    savings = np.maximum(np.nan_to_num(1.3 - costs, nan=0.0), 0.0)
    best = savings[linear_sum_assignment(savings, maximize=True)].sum()
    assert (1.3 - costs[i, j]).sum() == pytest.approx(best)


def test_infeasible_pair_is_not_matched_even_at_huge_unmatched_costs():
    rows, columns = assign(np.array([[np.nan, 0.4], [np.nan, np.nan]]), fp_cost=1e7, fn_cost=1e7)
    assert (rows.tolist(), columns.tolist()) == ([0], [1])


def test_every_matching_config_key_reaches_match_options():
    keys = {
        "assignment": "dynamic", "matched_text_weight": 0.5,
        "candidate_top_k": 3, "maskiou_gate": 0.25, "maskiou_resolution": 64, "fp_cost": 0.5, "fn_cost": 2.0,
        "ot_cost": "l1", "ot_epsilon": 4.0, "ot_iters": 2, "maskiou_mode": "supersample",
        "ot_epsilon_mode": "relative", "ot_bbox_target": "aabb", "missed_desc_weight": 1.5,
        "duplicate_iou": 0.9, "unmatched_objects": "dropped", "unmatched_weight": 0.2,
    }  # fmt: skip
    assert asdict(MatchOptions.from_config(RolloutMatching(**keys))) == keys
    assert MatchOptions.from_config(RolloutMatching()) == MatchOptions()


@pytest.mark.parametrize(("mode", "matched"), [("canvas", 0), ("analytic", 1), ("supersample", 1)])
def test_maskiou_mode_decides_whether_tiny_box_matches(mode, matched):
    dot = [box(500, 500, 501, 501)]
    assert len(match(dot, dot, MatchOptions(maskiou_mode=mode)).pairs) == matched
