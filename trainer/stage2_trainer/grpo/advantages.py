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

    A reward of NaN counts for nothing, and its advantage is 0.
    grpo and reinforce_plus_plus subtract the group's mean, rloo the mean of the group's others. The spread is that of
    the rewards, or with reinforce_plus_plus that of what is left of them.
    """
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    if estimator == "rloo":
        known = (~grouped.isnan()).sum(dim=1, keepdim=True)
        centred = centred * known / (known - 1)
    if scale == "none":
        return centred.flatten().nan_to_num(0.0)
    spread_of = centred if estimator == "reinforce_plus_plus" else grouped
    spread = _spread(spread_of if scale == "group" else spread_of.view(1, -1))
    return (centred / (spread + EPSILON)).flatten().nan_to_num(0.0)


def _spread(rows: Tensor) -> Tensor:
    """Return the standard deviation of what each row knows, shape (rows, 1)."""
    known = (~rows.isnan()).sum(dim=1, keepdim=True)
    squares = (rows - rows.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    return (squares / (known - 1)).sqrt()


def with_divergence(rewards: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return the rewards (N,) less beta times the divergence of each answer from the reference model.

    policy, reference: log-probabilities of the answer's tokens (N, T); mask (N, T) is 1 where there is one.
    """
    return rewards - beta * ((policy - reference) * mask).sum(dim=1)
