"""The training dataloader: raw batches of records, every sample in exactly one, as many in each process.

The last batches are made shorter where samples cannot be divided evenly: none is repeated, and no process waits for a
batch that never comes. With reused rollouts every full accumulation window comes several times in a row, so that a
reused step skips no sample; a last, partial window comes once. Source: semantics, section 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Sampler
from transformers import TrainingArguments

from stage2_trainer.data.records import Record
from stage2_trainer.learner.batch_sizes import batch_sizes
from stage2_trainer.process.ranks import world_size


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


class EvenBatchSampler(Sampler[list[int]]):
    """A sampler of batches of at most `batch_size` samples, never an empty one, `processes` of them at a time.

    With `drop_last`, samples that do not fill the last batches are left out.

    Raises:
        ConfigError: the samples cannot be divided so.
    """

    def __init__(self, sampler: Sampler[int], batch_size: int, *, processes: int, drop_last: bool) -> None:
        self.sampler = sampler  # where accelerate finds it, to give all processes the same order
        self.drop_last = drop_last
        self._sizes = batch_sizes(len(sampler), batch_size, processes=processes, drop_last=drop_last)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        samples = iter(self.sampler)
        for size in self._sizes:
            yield list(islice(samples, size))

    def __len__(self) -> int:
        return len(self._sizes)


def train_dataloader(
    records: Any, sampler: Sampler[int], args: TrainingArguments, *, batch_size: int, m_steps: int
) -> DataLoader[Any]:
    """Return the batches of all processes; each full accumulation window comes `m_steps` times in a row.

    Raises:
        ConfigError: the samples cannot be divided evenly among the learner processes.
    """
    batches = EvenBatchSampler(sampler, batch_size, processes=world_size(), drop_last=args.dataloader_drop_last)
    window = args.gradient_accumulation_steps * world_size()
    return DataLoader(
        records,
        batch_sampler=RepeatedWindowSampler(batches, window=window, times=m_steps),
        collate_fn=as_list,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
    )


def as_list(records: list[Record]) -> Any:
    """Collate to what it was."""
    return records
