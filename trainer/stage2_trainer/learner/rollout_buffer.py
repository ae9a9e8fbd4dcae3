"""Rollouts for several optimizer steps: one makes them (E-step), those after it train on them again (M-steps).

The dataloader repeats every full accumulation window, so that a reused step passes over no sample that is not in the
rollouts; a last, partial window passes once. What is kept is never changed: each step lays out tensors of its own.
Source: semantics, section 9.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch.utils.data import Sampler

from stage2_trainer.data.records import Record
from stage2_trainer.learner.batch_sampler import EvenBatchSampler

T = TypeVar("T")


class ReuseError(RuntimeError):
    """The dataloader and the kept rollouts are out of step: a defect of the learner, not of a configuration."""


class RepeatedWindowSampler(Sampler[list[int]]):
    """Yields each run of `window` batches `times` times, and what is left at the end once.

    window: batches of one optimizer step in all learner processes together.
    """

    def __init__(self, batches: EvenBatchSampler, *, window: int, times: int) -> None:
        self._batches = batches
        self._window = window
        self._times = times
        self.drop_last = batches.drop_last

    @property
    def sampler(self) -> Sampler[int]:
        """The order of the samples; accelerate replaces it by one that all processes share."""
        return self._batches.sampler

    @sampler.setter
    def sampler(self, sampler: Sampler[int]) -> None:
        self._batches.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        window: list[list[int]] = []
        for batch in self._batches:
            window.append(batch)
            if len(window) == self._window:
                for _ in range(self._times):
                    yield from map(list, window)
                window = []
        yield from window

    def __len__(self) -> int:
        full, left = divmod(len(self._batches), self._window)
        return full * self._window * self._times + left


def uses_left(batches_before: int, *, batches: int, window: int, times: int) -> int:
    """Return for how many optimizer steps, this one included, the window that begins now is trained on.

    batches_before: batches of this process before it in the epoch. batches: those of an epoch. window: those of a
    window. A run that goes on from a checkpoint may begin in the midst of a window's steps.

    >>> [uses_left(n, batches=7, window=3, times=2) for n in (0, 3, 6)]
    [2, 1, 1]
    """
    full = batches // (window * times)
    at, done = divmod(batches_before // window, times)
    return times - done if at < full else 1


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


class RolloutBuffer(Generic[T]):
    """Keeps one window; empty after a start, and whenever a step comes that cannot reuse it."""

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
