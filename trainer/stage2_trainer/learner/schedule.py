"""The order of a run: which records each optimizer step reads, and when it reports, evaluates and saves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import TrainingArguments

from stage2_trainer.data.records import Record
from stage2_trainer.data.run_records import batch_sizes
from stage2_trainer.learner.estep import RawBatches


@dataclass(frozen=True)
class Window:
    """The raw batches of one optimizer step in this process.

    step: its number, from 0. following: the batches of the next step, where rollouts are requested one step ahead.
    uses: how many steps, this one included, train on these rollouts. epoch_after: the epochs done when it has ended.
    """

    step: int
    batches: RawBatches
    following: RawBatches
    uses: int
    epoch_after: float
    ends_epoch: bool
    is_last: bool


class Schedule:
    """The optimizer steps of a run. readers: processes that read different records; reader: which of them this is."""

    def __init__(
        self,
        records: Sequence[Record],
        args: TrainingArguments,
        *,
        readers: int = 1,
        reader: int = 0,
        m_steps: int = 1,
        pipelined: bool = False,
    ) -> None:
        self._args, self._times, self._pipelined = args, m_steps, pipelined
        self._accumulated = args.gradient_accumulation_steps
        seed = args.seed if args.data_seed is None else args.data_seed
        order = EvenBatchSampler(
            EpochOrder(len(records), seed),
            args.per_device_train_batch_size,
            processes=readers,
            drop_last=args.dataloader_drop_last,
            window=self._accumulated * readers,
            times=m_steps,
        )
        self._own = OwnBatches(order, readers, reader)
        self._batches = len(order) // readers
        self.steps_per_epoch = max(1, -(-self._batches // self._accumulated))
        self.max_steps = (
            args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self.steps_per_epoch)
        )
        self._loader: DataLoader[Any] = DataLoader(
            records,  # type: ignore[arg-type]
            batch_sampler=self._own,
            collate_fn=list,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            generator=torch.Generator(),  # of its own: the start of an epoch draws nothing from the global one
        )

    def windows(self, first: int) -> Iterator[Window]:
        """Yield the windows of the steps from `first` on; records of earlier steps are not read."""
        step = first
        while step < self.max_steps:
            epoch, start = divmod(step, self.steps_per_epoch)
            self._own.epoch, self._own.first = epoch, start * self._accumulated
            batches = iter(self._loader)
            following: RawBatches = ()
            for place in range(start, self.steps_per_epoch):
                if step == self.max_steps:
                    return
                window = following or list(islice(batches, self._accumulated))
                following = list(islice(batches, self._accumulated)) if self._pipelined else ()
                yield self._window(step, place, window, following)
                step += 1

    def _window(self, step: int, place: int, batches: RawBatches, following: RawBatches) -> Window:
        before = place * self._accumulated
        is_last = step + 1 == self.max_steps
        return Window(
            step=step,
            batches=batches,
            following=() if is_last else following,
            uses=uses_left(before, batches=self._batches, window=self._accumulated, times=self._times),
            epoch_after=step // self.steps_per_epoch + (before + len(batches)) / self._batches,
            ends_epoch=place + 1 == self.steps_per_epoch,
            is_last=is_last,
        )

    @property
    def evaluates_first(self) -> bool:
        """Whether an evaluation precedes the first step."""
        return bool(self._args.eval_on_start)

    def reports(self, window: Window) -> bool:
        """Whether a report follows a step."""
        number = window.step + 1
        return number % int(self._args.logging_steps) == 0 or (number == 1 and self._args.logging_first_step)

    def evaluates(self, window: Window) -> bool:
        """Whether an evaluation follows a step."""
        return self._is_due(self._args.eval_strategy, self._args.eval_steps, window)

    def saves(self, window: Window) -> bool:
        """Whether a checkpoint follows a step."""
        return self._is_due(self._args.save_strategy, self._args.save_steps, window)

    @property
    def num_epochs(self) -> int:
        """The number of epochs, begun ones included."""
        if self._args.max_steps > 0:
            return -(-self.max_steps // self.steps_per_epoch)
        return math.ceil(self._args.num_train_epochs)

    @staticmethod
    def _is_due(strategy: str, every: float | None, window: Window) -> bool:
        if strategy == "epoch":
            return window.ends_epoch or window.is_last
        return strategy == "steps" and ((window.step + 1) % int(every or 1) == 0 or window.is_last)


class EpochOrder(Sampler[int]):
    """The order of an epoch's records, the same in all processes."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self.epoch = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        yield from torch.randperm(self._count, generator=generator).tolist()


class OwnBatches(Sampler[list[int]]):
    """The batches of this process in an epoch, from `first` on."""

    def __init__(self, batches: EvenBatchSampler, readers: int, reader: int) -> None:
        self._batches, self._readers, self._reader = batches, readers, reader
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[list[int]]:
        order: Any = self._batches.sampler
        order.epoch = self.epoch
        yield from islice(self._batches, self._reader + self.first * self._readers, None, self._readers)


class EvenBatchSampler(Sampler[list[int]]):
    """Yields batches of at most `batch_size` samples, never an empty one, `processes` of them at a time.

    Every sample is in exactly one batch: the last batches are shorter where samples cannot be divided evenly. window:
    batches of one optimizer step in all learner processes; each full window comes `times` times in a row, so that a
    step that reuses rollouts skips no sample, and a partial one at the end once (semantics, section 9). `drop_last`
    leaves out the samples that do not fill the last batches.

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
