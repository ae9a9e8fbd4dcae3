"""Polygon transport beyond the golden vectors: any sizes, any epsilon."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_trainer.matching.assign import MatchOptions
from stage2_trainer.matching.sinkhorn import barycentric, target_bins
from tests.unit.trainer.matching.strategies import box, poly


def square(low, high):
    return np.array([[low, low], [high, low], [high, high], [low, high]], dtype=float)


def plain_sinkhorn(x, y, epsilon, iterations, order=2):
    """Semantics, section 4.5, as written."""
    cost = np.linalg.norm(x[:, None] - y[None], ord=order, axis=-1)
    kernel = np.exp(np.clip(-cost / epsilon, -50, 50))
    u, v = np.ones(len(x)), np.ones(len(y))
    for _ in range(iterations):
        u = (1 / len(x)) / (kernel @ v)
        v = (1 / len(y)) / (kernel.T @ u)
    plan = u[:, None] * kernel * v[None]
    return plan @ y / plan.sum(axis=1, keepdims=True)


def moved(x, y, epsilon=10.0, **options):
    return barycentric([x], [y], np.array([epsilon]), **options)[0]


sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(st.lists(sizes, min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.sampled_from(["l1", "l2"]))
@settings(max_examples=60, deadline=None)
def test_batched_transport_equals_formula_for_each_pair(shapes, seed, cost):
    rng = np.random.default_rng(seed)
    x = [rng.integers(0, 300, (n, 2)).astype(float) for n, _ in shapes]
    y = [rng.integers(0, 300, (m, 2)).astype(float) for _, m in shapes]
    epsilon = rng.uniform(20, 50, len(shapes))
    got = barycentric(x, y, epsilon, cost=cost, iterations=7)
    for one, other, eps, result in zip(x, y, epsilon, got, strict=True):
        expected = plain_sinkhorn(one, other, eps, 7, order=1 if cost == "l1" else 2)
        np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 1.0, 1e9])
def test_transported_points_stay_within_target_bounds_for_any_epsilon(epsilon):
    x, y = square(0, 999), square(300, 305)
    result = moved(x, y, epsilon, iterations=100)
    assert np.isfinite(result).all()
    assert result.min() >= 300 - 1e-9
    assert result.max() <= 305 + 1e-9


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_epsilon_counts_as_one_bin(epsilon):
    pair = (poly(100, 100, 110, 100, 105, 110), poly(101, 100, 111, 100, 106, 110))
    assert target_bins([pair], MatchOptions(ot_epsilon=epsilon)) == target_bins([pair], MatchOptions(ot_epsilon=1.0))


def test_zero_transport_iterations_count_as_one():
    pair = (poly(100, 100, 110, 100, 105, 110), box(90, 90, 120, 120))
    assert target_bins([pair], MatchOptions(ot_iters=0)) == target_bins([pair], MatchOptions(ot_iters=1))
