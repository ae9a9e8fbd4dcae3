"""Raw batches of an epoch for all learner processes: every sample in exactly one, and every process has as many.

What libraries do where samples cannot be divided, to repeat the first ones or to let one process wait for a batch that
never comes, is no way for a run that counts its samples: the last batches are made shorter instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import Sampler

from stage2_trainer.learner.batch_sizes import batch_sizes


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
