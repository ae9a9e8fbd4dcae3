"""The error that packing raises; every message says which setting would help."""

from __future__ import annotations

from collections.abc import Sequence


class PackingError(ValueError):
    """Segments that do not fit the rows that the configuration gives them."""


def over_cap(length: int, cap: int) -> str:
    """Say that a segment of `length` tokens fits no row of `cap`, and what would help."""
    return (
        f"segment of {length} tokens; at most global_max_length = {cap} fit a row; raise global_max_length, "
        "lower custom.extra.rollout_matching.max_new_tokens, set custom.extra.rollout_matching."
        "post_rollout_overlong: cut, or set training.packing: false"
    )


def check_lengths(lengths: Sequence[int], cap: int) -> None:
    """Raise PackingError unless every segment has at least one token and fits a row alone."""
    for length in lengths:
        if length > cap:
            raise PackingError(over_cap(length, cap))
        if length < 1:
            raise PackingError(f"segment of {length} tokens; a segment has at least one; encode it again")
