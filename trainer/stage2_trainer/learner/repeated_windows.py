"""The raw batches of a run that reuses rollouts: every full accumulation window several times in a row.

So a reused step passes over no sample that is not in the rollouts; a last, partial window passes once.
Source: semantics, section 9.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from stage2_trainer.learner.batch_sampler import EvenBatchSampler


class RepeatedWindowSampler(Sampler[list[int]]):
    """A sampler that yields each run of `window` batches `times` times, and what is left at the end once.

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
