"""Raw batches of an epoch for all learner processes: every sample in exactly one, and every process has as many.

What libraries do where samples cannot be divided, to repeat the first ones or to let one process wait for a batch that
never comes, is no way for a run that counts its samples: the last batches are made shorter instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import Sampler

from stage2_api.errors import ConfigError, Problem


class EvenBatches(Sampler[list[int]]):
    """Yields batches of at most `batch_size` samples, never an empty one, `processes` of them at a time.

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


def batch_sizes(samples: int, batch_size: int, *, processes: int, drop_last: bool) -> list[int]:
    """Return the sizes of an epoch's batches: full ones, and the last one or two of each process as even as can be.

    Raises:
        ConfigError: there are fewer samples than batches.

    >>> batch_sizes(13, 2, processes=4, drop_last=False)
    [2, 2, 2, 2, 2, 1, 1, 1]
    >>> batch_sizes(9, 2, processes=4, drop_last=False)
    [2, 1, 1, 1, 1, 1, 1, 1]
    """
    at_once = batch_size * processes
    full, left = divmod(samples, at_once)
    if left == 0 or drop_last:
        return [batch_size] * processes * full
    shared = processes
    if left < processes and full:  # not even one for each: the batches before give some
        full, left, shared = full - 1, left + at_once, 2 * processes
    if left < shared:
        raise ConfigError([_indivisible(samples, batch_size, processes)])
    each, longer = divmod(left, shared)
    return [batch_size] * processes * full + [each + 1] * longer + [each] * (shared - longer)


def _indivisible(samples: int, batch_size: int, processes: int) -> Problem:
    rule = (
        f"{samples} samples in batches of {batch_size} do not give each of {processes} learner processes equally many "
        "batches, unless samples are left out or trained on twice"
    )
    limit = samples // processes * processes
    way_out = "set training.per_device_train_batch_size to at least 2, or training.dataloader_drop_last to true"
    if limit:
        way_out += f", or custom.train_sample_limit to {limit}"
    return Problem("custom.train_jsonl", samples, rule, way_out)
