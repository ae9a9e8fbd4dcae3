"""Advantages against the papers' formulas, written out answer by answer."""

import random
from statistics import fmean, stdev

import pytest
import torch

from stage2_trainer.grpo.objective import EPSILON, advantages

GROUP = 4


def rewards() -> list[list[float]]:
    """Three groups; in the last one all answers score the same."""
    rng = random.Random(11)
    return [[rng.uniform(-1, 3) for _ in range(GROUP)] for _ in range(2)] + [[0.5] * GROUP]


def advantages_of(groups: list[list[float]], **options: str) -> list[float]:
    flat = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    return advantages(flat, GROUP, **options).tolist()


def grpo(groups: list[list[float]]) -> list[float]:
    """DeepSeekMath, section 4.1.2: (r - mean of the group) / std of the group."""
    return [(r - fmean(group)) / (stdev(group) + EPSILON) for group in groups for r in group]


def grpo_over_batch(groups: list[list[float]]) -> list[float]:
    """The same, divided by the spread of all rewards of the round (Lite PPO, arXiv 2508.08221)."""
    spread = stdev(r for group in groups for r in group) + EPSILON
    return [(r - fmean(group)) / spread for group in groups for r in group]


def rloo(groups: list[list[float]]) -> list[float]:
    """Back to Basics, equation 9: r - mean of the other answers' rewards."""
    return [r - fmean(group[:i] + group[i + 1 :]) for group in groups for i, r in enumerate(group)]


def reinforce_plus_plus(groups: list[list[float]]) -> list[float]:
    """REINFORCE++ with a baseline: A = r - mean of the group, then (A - mean of the batch) / std of the batch."""
    centred = [r - fmean(group) for group in groups for r in group]
    return [(a - fmean(centred)) / (stdev(centred) + EPSILON) for a in centred]


@pytest.mark.parametrize(
    ("reference", "options"),
    [
        (grpo, {"estimator": "grpo", "scale": "group"}),
        (grpo_over_batch, {"estimator": "grpo", "scale": "batch"}),
        (rloo, {"estimator": "rloo", "scale": "none"}),
        (reinforce_plus_plus, {"estimator": "reinforce_plus_plus", "scale": "batch"}),
    ],
)
def test_advantages_equal_formula_of_paper(reference, options):
    assert advantages_of(rewards(), **options) == pytest.approx(reference(rewards()))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_with_equal_rewards_has_zero_advantages(estimator, scale):
    assert advantages_of(rewards(), estimator=estimator, scale=scale)[-GROUP:] == [0.0] * GROUP
