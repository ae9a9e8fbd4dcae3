"""Advantages of a round of rollouts, for the estimators that TRL's trainer has not, and with divergence in the reward.

Sources: GRPO (arXiv 2402.03300), RLOO (arXiv 2402.14740), REINFORCE++ with a group baseline (arXiv 2501.03262).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

EPSILON = 1e-4  # what TRL adds to a spread before it divides by it


def advantages(
    rewards: Tensor,
    group: int,
    *,
    estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo",
    scale: Literal["group", "batch", "none"] = "group",
) -> Tensor:
    """Return the advantage of each answer, shape (N,), from the rewards (N,) of groups of `group` in a row.

    grpo and reinforce_plus_plus subtract the group's mean, rloo the mean of the group's others. The spread is that of
    the rewards, or with reinforce_plus_plus that of what is left of them.
    """
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    if estimator == "rloo":
        centred = centred * group / (group - 1)
    if scale == "none":
        return centred.flatten()
    spread_of = centred if estimator == "reinforce_plus_plus" else grouped
    spread = spread_of.std(dim=1, keepdim=True) if scale == "group" else spread_of.std()
    return (centred / (spread + EPSILON)).flatten()


def with_divergence(rewards: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return the rewards (N,) less beta times the divergence of each answer from the reference model.

    policy, reference: log-probabilities of the answer's tokens (N, T); mask (N, T) is 1 where there is one.
    """
    return rewards - beta * ((policy - reference) * mask).sum(dim=1)
