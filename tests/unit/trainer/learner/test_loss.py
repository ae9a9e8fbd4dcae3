"""The loss: reference values, gradients, and no NaN for any input."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.learner.loss import (
    LossTargets,
    loss_targets,
    soft_targets,
    stage2_loss,
    stage2_loss_from_hidden,
    window_means,
)
from stage2_trainer.matching.masks import Supervision
from tests.unit.trainer.matching.golden import golden

V, H = 1300, 10
COORD_IDS = torch.arange(1000) + 150


def targets(labels, bins, prefix=0):
    return LossTargets(
        positions=torch.arange(1, len(labels) + len(bins) + 1),
        labels=torch.tensor(labels, dtype=torch.int64),
        bins=torch.tensor(bins, dtype=torch.int64),
        in_prefix=torch.arange(len(bins)) < prefix,
        prefix_count=prefix,
        ce_denominator=max(len(labels), 1),
        coord_denominator=max(len(bins), 1),
    )


def random_case(ordinary=12, coords=9, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ordinary + coords, H, generator=rng, dtype=dtype)
    weight = torch.randn(V, H, generator=rng, dtype=dtype)
    labels = torch.randint(0, V, (ordinary,), generator=rng).tolist()
    bins = torch.randint(0, 1000, (coords,), generator=rng).tolist()
    return hidden, weight, targets(labels, bins, prefix=coords // 2)


def coord_loss(logits, bins, options):
    return stage2_loss(logits, targets([], bins), COORD_IDS, options).coord.item()


def test_soft_target_is_zero_beyond_truncation():
    (target,) = soft_targets(torch.tensor([10]), RolloutMatching(target_truncate=2))
    assert torch.nonzero(target).flatten().tolist() == [8, 9, 10, 11, 12]
    (point,) = soft_targets(torch.tensor([10]), RolloutMatching(target_truncate=0))
    assert point[10] == 1


def reference(logits, wanted, options):
    """Section 6 in float64, position by position."""
    logits = logits.double().numpy()
    ce = [-(row[label] - np.logaddexp.reduce(row)) for row, label in zip(logits, wanted.labels.tolist(), strict=False)]
    coord = []
    for row, t in zip(logits[len(ce) :], wanted.bins.tolist(), strict=True):
        i = np.arange(1000)
        q = np.exp(-((i - t) ** 2) / (2 * options.target_sigma**2))
        if options.target_truncate is not None:
            q[np.abs(i - t) > options.target_truncate] = 0
        q /= q.sum()
        z = row[COORD_IDS.numpy()] / options.temperature_coord
        log_p = z - np.logaddexp.reduce(z)
        w1 = np.abs(np.cumsum(np.exp(log_p)) - np.cumsum(q)).sum() / 1000
        gate = max(0.0, np.logaddexp.reduce(row / options.temperature_coord) - np.logaddexp.reduce(z))
        coord.append(options.soft_ce_weight * -(q * log_p).sum() + options.w1_weight * w1 + options.gate_weight * gate)
    return np.mean(ce), np.mean(coord)


@pytest.mark.parametrize(
    "options",
    [
        RolloutMatching(),
        RolloutMatching(soft_ce_weight=0.3, w1_weight=2.0, gate_weight=0.5, temperature_coord=1.7, target_sigma=5.0),
        RolloutMatching(target_truncate=8, temperature_coord=0.5),
    ],
)
def test_float32_loss_agrees_with_float64_reference(options):
    hidden, weight, wanted = random_case()
    logits = hidden @ weight.T
    parts = stage2_loss(logits, wanted, COORD_IDS, options)
    ce, coord = reference(logits, wanted, options)
    assert parts.ce.item() == pytest.approx(ce, rel=1e-5)
    assert parts.coord.item() == pytest.approx(coord, rel=1e-5)
    assert parts.total.item() == pytest.approx(ce + coord, rel=1e-5)


def test_prefix_and_tail_losses_are_separate_means():
    hidden, weight, wanted = random_case(coords=9)
    parts = stage2_loss(hidden @ weight.T, wanted, COORD_IDS, RolloutMatching())
    assert (parts.ce_count, parts.coord_prefix_count, parts.coord_tail_count) == (12, 4, 5)
    assert (4 * parts.coord_prefix + 5 * parts.coord_tail) / 9 == pytest.approx(parts.coord.item(), rel=1e-6)


@pytest.mark.parametrize(("ordinary", "coords"), [(12, 9), (0, 9), (12, 0), (0, 0)])
@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("weighted", [False, True])
def test_chunked_loss_and_gradients_equal_plain_loss(ordinary, coords, rows, weighted):
    hidden, weight, wanted = random_case(ordinary, coords, torch.float64)
    if weighted:
        wanted = replace(wanted, weights=torch.linspace(-1, 1.5, ordinary))
    bias = torch.randn(V, dtype=torch.float64)
    inputs = [one.requires_grad_() for one in (hidden, weight, bias)]
    plain = stage2_loss(functional.linear(*inputs), wanted, COORD_IDS, RolloutMatching())
    chunked = stage2_loss_from_hidden(
        hidden, weight, wanted, COORD_IDS, RolloutMatching(), bias=bias, chunk_elements=rows * V
    )
    for name in ("total", "ce", "coord", "coord_prefix", "coord_tail"):
        torch.testing.assert_close(getattr(chunked, name), getattr(plain, name))
    expected = torch.autograd.grad(2 * plain.total, inputs)
    torch.testing.assert_close(torch.autograd.grad(2 * chunked.total, inputs), expected)


def test_frozen_inputs_get_no_gradient():
    hidden, weight, wanted = random_case()
    hidden.requires_grad_()
    stage2_loss_from_hidden(hidden, weight, wanted, COORD_IDS, RolloutMatching()).total.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_loss_requires_no_gradient_under_no_grad():
    hidden, weight, wanted = random_case()
    with torch.no_grad():
        parts = stage2_loss_from_hidden(hidden.requires_grad_(), weight, wanted, COORD_IDS, RolloutMatching())
    assert not parts.total.requires_grad


def test_chunked_bfloat16_loss_agrees_with_plain_loss():
    hidden, weight, wanted = random_case(dtype=torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    plain = stage2_loss(hidden @ weight.T, wanted, COORD_IDS, RolloutMatching())
    chunked = stage2_loss_from_hidden(hidden, weight, wanted, COORD_IDS, RolloutMatching(), chunk_elements=4 * V)
    assert chunked.total.dtype == torch.float32
    torch.testing.assert_close(chunked.total, plain.total)
    expected = torch.autograd.grad(plain.total, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(chunked.total, (hidden, weight)), expected, rtol=0.02, atol=1e-3)


def test_bfloat16_gradients_are_summed_over_chunks_in_float32():
    """In bfloat16 a sum of equal parts stands still at 256 of them."""
    rows = 600
    hidden = torch.ones(rows, H, dtype=torch.bfloat16)
    weight = torch.zeros(V, H, dtype=torch.bfloat16, requires_grad=True)
    wanted = targets([7] * rows, [])
    loss = stage2_loss_from_hidden(hidden, weight, wanted, COORD_IDS, RolloutMatching(), chunk_elements=V)
    (gradient,) = torch.autograd.grad(loss.total, weight)
    assert gradient[7].tolist() == pytest.approx([1 / V - 1] * H, rel=2**-7)


def test_gradients_pass_gradcheck():
    hidden, weight, wanted = random_case(ordinary=2, coords=2, dtype=torch.float64)
    bias = torch.zeros(V, dtype=torch.float64, requires_grad=True)
    options = RolloutMatching(target_sigma=3.0, temperature_coord=1.3)

    def plain(hidden, bias):
        return stage2_loss(functional.linear(hidden, weight, bias), wanted, COORD_IDS, options).total

    def chunked(hidden, bias):
        return stage2_loss_from_hidden(hidden, weight, wanted, COORD_IDS, options, bias=bias, chunk_elements=V).total

    hidden.requires_grad_()
    assert torch.autograd.gradcheck(plain, (hidden, bias), fast_mode=True)
    assert torch.autograd.gradcheck(chunked, (hidden, bias), fast_mode=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30, 0.0])
@pytest.mark.parametrize(("ordinary", "coords"), [(2, 2), (0, 2), (2, 0), (0, 0)])
def test_loss_and_gradient_are_finite_for_non_finite_logits(value, ordinary, coords):
    logits = torch.full((ordinary + coords, V), value).requires_grad_()
    wanted = targets([3] * ordinary, [0, 999][:coords])
    parts = stage2_loss(logits, wanted, COORD_IDS, RolloutMatching())
    parts.total.backward()
    assert all(
        torch.isfinite(one) for one in (parts.total, parts.ce, parts.coord, parts.coord_prefix, parts.coord_tail)
    )
    assert torch.isfinite(logits.grad).all()


def test_nan_among_coordinate_logits_counts_as_zero():
    logits = torch.randn(1, V)
    broken = logits.clone()
    logits[0, 600], broken[0, 600] = 0.0, float("nan")
    assert coord_loss(broken, [440], RolloutMatching()) == coord_loss(logits, [440], RolloutMatching())


def losses_of_a_split(normalizer):
    """The loss of 6 tokens and 4 coordinates as one micro-step, and as the mean of two that share them unevenly."""
    hidden, weight, wanted = random_case(ordinary=6, coords=4)
    logits, rows = hidden @ weight.T, torch.arange(10)
    whole = stage2_loss(logits, wanted, COORD_IDS, RolloutMatching()).total
    parts = [
        targets(wanted.labels[:1].tolist(), wanted.bins[:3].tolist()),
        targets(wanted.labels[1:].tolist(), wanted.bins[3:].tolist()),
    ]
    picks = [torch.cat([rows[:1], rows[6:9]]), torch.cat([rows[1:6], rows[9:]])]
    split = [
        stage2_loss(logits[pick], part, COORD_IDS, RolloutMatching()).total
        for pick, part in zip(picks, window_means(parts, 2) if normalizer == "window" else parts, strict=True)
    ]
    return whole, sum(split) / 2


def test_window_normalized_loss_does_not_depend_on_micro_step_split():
    whole, split = losses_of_a_split("window")
    torch.testing.assert_close(split, whole)


def test_micro_step_normalized_loss_depends_on_micro_step_split():
    whole, split = losses_of_a_split("micro")
    assert split != pytest.approx(whole.item(), rel=1e-3)


def test_window_without_coordinates_has_denominator_one():
    (alone,) = window_means([targets([1, 2], [])], 1)
    assert (alone.ce_denominator, alone.coord_denominator) == (2, 1)


@pytest.mark.parametrize(
    "shape", [{"target_sigma": k} for k in (5e-324, 1e-30, 1e300)] + [{"temperature_coord": 1e-300}]
)
def test_loss_is_finite_for_extreme_sigma_and_temperature(shape):
    logits = random_case(ordinary=0, coords=3)
    logits = (logits[0] @ logits[1].T).requires_grad_()
    total = stage2_loss(logits, targets([], [0, 500, 999]), COORD_IDS, RolloutMatching(**shape)).total
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(logits.grad).all()


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return found


def test_chunked_loss_allocates_no_tensor_of_positions_times_vocabulary():
    hidden, weight, wanted = random_case(ordinary=60, coords=40)
    inputs = [one.requires_grad_() for one in (hidden, weight)]
    with LargestTensor() as plain:
        stage2_loss(hidden @ weight.T, wanted, COORD_IDS, RolloutMatching()).total.backward()
    with LargestTensor() as chunked:
        stage2_loss_from_hidden(*inputs, wanted, COORD_IDS, RolloutMatching(), chunk_elements=5 * V).total.backward()
    assert plain.elements >= 100 * V
    assert chunked.elements == V * H  # the output layer itself


def test_loss_targets_list_ordinary_tokens_before_coordinates():
    labels = np.array([-100, -100, 4, -100, 5])
    masks = Supervision(labels, np.array([1, 3]), np.array([77, 500]), np.array([True, False]))
    wanted = loss_targets(masks)
    assert wanted.positions.tolist() == [2, 4, 1, 3]
    assert wanted.logit_positions.tolist() == [1, 3, 0, 2]
    assert wanted.labels.tolist() == [4, 5]
    assert wanted.bins.tolist() == [77, 500]
    assert (wanted.ce_denominator, wanted.coord_denominator) == (2, 2)


def test_token_weights_scale_cross_entropy_and_negative_ones_penalise_token():
    logits = torch.zeros(3, V)
    logits[2, 5] = 40.0  # a token that is certain: 1 - p underflows, its logarithm must not
    wanted = replace(targets([1, 2, 5], []), weights=torch.tensor([1.5, -0.1, -0.5]))
    parts = stage2_loss(logits, wanted, COORD_IDS, RolloutMatching())
    against = -math.log(1 - 1 / V), 40.0 - math.log(V - 1)
    assert parts.ce.item() == pytest.approx((1.5 * math.log(V) + 0.1 * against[0] + 0.5 * against[1]) / 3, rel=1e-6)


def test_negative_weight_lowers_token_logit_and_raises_all_others():
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(3)).requires_grad_()
    wanted = replace(targets([4], []), weights=torch.tensor([-1.0]))
    stage2_loss(logits, wanted, COORD_IDS, RolloutMatching()).total.backward()
    others = [i for i in range(V) if i != 4]
    assert logits.grad[0, 4] > 0
    assert (logits.grad[0, others] < 0).all()


@pytest.mark.parametrize("weights", [None, torch.linspace(-1, 1.5, 12)])
def test_repeated_row_adds_neither_loss_nor_gradient(weights):
    hidden, weight, wanted = random_case()
    inputs = [one.requires_grad_() for one in (hidden, weight)]
    repeated = replace(wanted, weights=weights).without_loss().divided_by(ce=12, coord=9)
    parts = stage2_loss_from_hidden(hidden[repeated.logit_positions], weight, repeated, COORD_IDS, RolloutMatching())
    parts.total.backward()
    assert parts.total == 0
    assert (parts.ce_count, parts.coord_prefix_count, parts.coord_tail_count) == (0, 0, 0)
    assert not any(one.grad.any() for one in inputs)


def test_token_weights_of_one_do_not_change_loss():
    hidden, weight, wanted = random_case()
    logits = hidden @ weight.T
    ones = replace(wanted, weights=torch.ones(len(wanted.labels)))
    found = [stage2_loss(logits, one, COORD_IDS, RolloutMatching()).total for one in (wanted, ones)]
    torch.testing.assert_close(found[0], found[1])


def test_only_ordinary_token_targets_keep_weights():
    labels = np.array([-100, 4, 5, -100])
    weights = np.array([1.0, 1.0, -0.5, 1.0])
    masks = Supervision(labels, np.array([3]), np.array([500]), np.array([False]), weights)
    ordinary, coords = loss_targets(masks).parts()
    assert ordinary.weights.tolist() == [1.0, -0.5]
    assert coords.weights is None


TERMS = [(case, term) for case in golden()["loss"] for term in ("soft_ce", "w1", "gate") if term in case]


@pytest.mark.parametrize(("case", "term"), TERMS)
def test_loss_terms_match_golden_values(case, term):
    weights = {f"{name}_weight": float(name == term) for name in ("soft_ce", "w1", "gate")}
    logits = torch.zeros(1, 1000 + case["others"])
    if case["peak"] is not None:
        logits[:] = -1e4
        logits[0, case["peak"]] = 1e4
    none = torch.zeros(0, dtype=torch.int64)
    targets = LossTargets(torch.tensor([1]), none, torch.tensor([case["target"]]), torch.tensor([True]), 1, 1, 1)
    parts = stage2_loss(logits, targets, torch.arange(1000), RolloutMatching(**weights))
    assert parts.coord.item() == pytest.approx(case[term], abs=1e-6)


@pytest.mark.parametrize("case", golden()["soft_target"])
def test_soft_target_matches_golden_values(case):
    options = RolloutMatching(target_sigma=case["sigma"], target_truncate=case["truncate"])
    (found,) = soft_targets(torch.tensor([case["target"]]), options, torch.float64)
    assert found.sum().item() == pytest.approx(1)
    first = case["from"]
    assert found[first : first + len(case["weights"])].tolist() == pytest.approx(case["weights"], abs=1e-6)
    if "entropy" in case:
        assert -torch.special.xlogy(found, found).sum().item() == pytest.approx(case["entropy"], abs=1e-6)
