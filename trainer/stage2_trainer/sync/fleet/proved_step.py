"""What proofs of syncs say of checkpoints; importing it takes no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ProvedStep:
    """The newest optimizer step whose weights were proved to answer; None = none of this start.

    A checkpoint of that step, or of an older one, was trained on rollouts of the weights that it should have been.
    """

    step: int | None = None
