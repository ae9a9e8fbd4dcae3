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
from stage2_trainer.data.run_records import batch_sizes
from stage2_trainer.process.ranks import world_size


def train_dataloader(
    records: Any, sampler: Sampler[int], args: TrainingArguments, *, batch_size: int, m_steps: int
) -> DataLoader[Any]:
    """Return the batches of all processes; each full accumulation window comes `m_steps` times in a row.

    Raises:
        ConfigError: the samples cannot be divided evenly among the learner processes.
    """
    batches = EvenBatchSampler(
        sampler,
        batch_size,
        processes=world_size(),
        drop_last=args.dataloader_drop_last,
        window=args.gradient_accumulation_steps * world_size(),
        times=m_steps,
    )
    return DataLoader(
        records,
        batch_sampler=batches,
        collate_fn=as_list,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
    )


class EvenBatchSampler(Sampler[list[int]]):
    """Yields batches of at most `batch_size` samples, never an empty one, `processes` of them at a time.

    window: batches of one optimizer step in all learner processes together; each full window is yielded `times` times,
    what is left at the end once. With `drop_last`, samples that do not fill the last batches are left out.

    Raises:
        ConfigError: the samples cannot be divided so.
    """

    def __init__(
        self,
        sampler: Sampler[int],
        batch_size: int,
        *,
        processes: int,
        drop_last: bool,
        window: int = 1,
        times: int = 1,
    ) -> None:
        self.sampler = sampler  # where accelerate finds it, to give all processes the same order
        self.drop_last = drop_last
        self._window = window
        self._times = times
        self._sizes = batch_sizes(len(sampler), batch_size, processes=processes, drop_last=drop_last)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        samples = iter(self.sampler)
        window: list[list[int]] = []
        for size in self._sizes:
            window.append(list(islice(samples, size)))
            if len(window) == self._window:
                for _ in range(self._times):
                    yield from map(list, window)
                window = []
        yield from window

    def __len__(self) -> int:
        full, left = divmod(len(self._sizes), self._window)
        return full * self._window * self._times + left


def uses_left(batches_before: int, *, batches: int, window: int, times: int) -> int:
    """Return how many optimizer steps, this one included, train on the window that begins now.

    batches_before: batches of this process before it in the epoch. batches: of an epoch. window: of a window. A resumed
    run may begin in the middle of a window's steps.

    >>> [uses_left(n, batches=7, window=3, times=2) for n in (0, 3, 6)]
    [2, 1, 1]
    """
    full = batches // (window * times)
    at, done = divmod(batches_before // window, times)
    return times - done if at < full else 1


def as_list(records: list[Record]) -> Any:
    """Return the batch unchanged."""
    return records
