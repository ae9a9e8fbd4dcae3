"""The rewards in a step's record: a GRPO run's keys, which its table and its picture read."""

from collections.abc import Mapping
from typing import Any

REWARD = "reward"  # of GRPO runs only
SPREAD = "reward_std"


def reward_means(step: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of the means in a step's record, by the names of a GRPO run's rewards."""
    prefix, suffix = "rewards/", "/mean"
    means = [key for key in step if key.startswith(prefix) and key.endswith(suffix)]
    return {key[len(prefix) : -len(suffix)]: key for key in means}
