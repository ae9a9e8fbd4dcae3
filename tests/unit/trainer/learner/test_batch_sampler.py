"""An epoch's batches: every sample once, every process as often, whatever the numbers."""

from __future__ import annotations

from itertools import product

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import SequentialSampler

from stage2_api.errors import ConfigError
from stage2_trainer.learner.batch_sizes import batch_sizes
from stage2_trainer.learner.dataloader import EvenBatchSampler, RepeatedWindowSampler

NUMBERS = [
    (samples, size, processes)
    for samples, size, processes in product(range(1, 30), (1, 2, 3, 5), (1, 2, 3, 4))
    if samples >= processes and (size > 1 or samples % processes == 0)
]


def shares(samples, size, processes, *, drop_last=False, times=1):
    """What each process gets, divided by accelerate."""
    found = []
    for index in range(processes):
        batches = EvenBatchSampler(SequentialSampler(range(samples)), size, processes=processes, drop_last=drop_last)
        repeated = RepeatedWindowSampler(batches, window=2 * processes, times=times)
        shard = BatchSamplerShard(repeated, processes, index, even_batches=False)
        found.append(list(shard))
        assert len(shard) == len(found[-1])
    return found


def test_every_sample_is_in_one_batch_and_every_process_has_as_many():
    for samples, size, processes in NUMBERS:
        found = shares(samples, size, processes)
        assert len({len(batches) for batches in found}) == 1, (samples, size, processes)
        flat = [batch for batches in found for batch in batches]
        assert sorted(i for batch in flat for i in batch) == list(range(samples)), (samples, size, processes)
        assert all(1 <= len(batch) <= size for batch in flat), (samples, size, processes)


def test_no_more_batches_are_made_than_full_ones_would_be():
    for samples, size, processes in NUMBERS:
        assert len(batch_sizes(samples, size, processes=processes, drop_last=False)) == (
            -(-samples // (size * processes)) * processes
        )


def test_what_does_not_fill_the_last_batches_is_left_out_when_asked_for():
    assert shares(11, 2, 2, drop_last=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_windows_of_all_processes_are_repeated_together():
    assert shares(10, 1, 2, times=2)[0] == [[0], [2], [0], [2], [4], [6], [4], [6], [8]]


@pytest.mark.parametrize(("samples", "size", "processes"), [(9, 1, 2), (3, 4, 4)])
def test_samples_that_cannot_be_divided_are_refused_with_the_ways_out(samples, size, processes):
    with pytest.raises(ConfigError, match=r"custom.train_jsonl.*trained on twice.*dataloader_drop_last to true"):
        batch_sizes(samples, size, processes=processes, drop_last=False)
