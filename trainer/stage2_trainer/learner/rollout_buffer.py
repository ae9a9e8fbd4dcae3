"""Rollouts for several optimizer steps: one makes them (E-step), those after it train on them again (M-steps).

What is kept is never changed: each step lays out tensors of its own. The dataloader repeats the raw batches to match
(`repeated_windows`).
Source: semantics, section 9.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stage2_trainer.data.records import Record

T = TypeVar("T")


class ReuseError(RuntimeError):
    """The dataloader and the kept rollouts are out of step: a defect of the learner, not of a configuration."""


def fingerprint(records: Sequence[Record]) -> str:
    """Return what tells one raw batch from another: SHA-1 of its records' places and names."""
    names = json.dumps([[record.index, record.sample_id] for record in records])
    return hashlib.sha1(names.encode(), usedforsecurity=False).hexdigest()


@dataclass
class KeptWindow(Generic[T]):
    """One window's micro-steps as the E-step made them, with the fingerprints of their raw batches.

    step0: the optimizer step that made them. uses: how many steps may train on them, the first included.
    """

    step0: int
    uses: int
    prints: list[str] = field(default_factory=list)
    micro_steps: list[T] = field(default_factory=list)


class ReuseBuffer(Generic[T]):
    """A buffer of one window; empty after a start, and whenever a step comes that cannot reuse it."""

    def __init__(self) -> None:
        self._kept: KeptWindow[T] | None = None
        self._whole = 0

    def begin(self, global_step: int, *, uses: int, micro_steps: int) -> int | None:
        """Begin an optimizer step of so many micro-steps; return how many have trained on what is kept.

        None: rollouts must be made; `keep` takes them, for `uses` steps in all.
        """
        kept = self._kept
        if kept is not None and self._reusable(kept, global_step, micro_steps):
            return global_step - kept.step0
        self._kept, self._whole = KeptWindow(global_step, uses), micro_steps
        return None

    def keep(self, records: Sequence[Record], micro_step: T) -> None:
        """Keep what the E-step made of a raw batch."""
        assert self._kept is not None, "a step has begun"
        self._kept.prints.append(fingerprint(records))
        self._kept.micro_steps.append(micro_step)

    def again(self, index: int, records: Sequence[Record]) -> T:
        """Return the kept micro-step `index` for the same raw batch.

        Raises:
            ReuseError: the dataloader gave another batch.
        """
        assert self._kept is not None, "a step has begun"
        if index >= len(self._kept.prints) or self._kept.prints[index] != fingerprint(records):
            raise ReuseError(
                f"micro-step {index}: this batch is not the one whose rollouts of step {self._kept.step0} are kept; "
                "the dataloader repeats other windows than the learner accumulates"
            )
        return self._kept.micro_steps[index]

    def reuses(self, global_step: int) -> bool:
        """Whether a step may train on what is kept."""
        kept = self._kept
        return kept is not None and 0 < global_step - kept.step0 < kept.uses

    @property
    def step0(self) -> int:
        """The optimizer step that made what is kept."""
        assert self._kept is not None, "a step has begun"
        return self._kept.step0

    def _reusable(self, kept: KeptWindow[T], global_step: int, micro_steps: int) -> bool:
        return len(kept.micro_steps) == self._whole == micro_steps and self.reuses(global_step)
