"""An epoch's batches: every sample once, every process as often, whatever the numbers."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import SequentialSampler

from stage2_api.errors import ConfigError
from stage2_trainer.data.run_records import batch_sizes
from stage2_trainer.learner.schedule import EvenBatchSampler, uses_left

NUMBERS = [
    (samples, size, processes)
    for samples, size, processes in product(range(1, 30), (1, 2, 3, 5), (1, 2, 3, 4))
    if samples >= processes and (size > 1 or samples % processes == 0)
]


def shares(samples, size, processes, *, drop_last=False, window=2, times=1):
    """What each process gets, divided by accelerate; a window has so many batches of each."""
    found = []
    for index in range(processes):
        batches = EvenBatchSampler(
            SequentialSampler(range(samples)), size,
            processes=processes, drop_last=drop_last, window=window * processes, times=times,
        )  # fmt: skip
        shard = BatchSamplerShard(batches, processes, index, even_batches=False)
        found.append(list(shard))
        assert len(shard) == len(found[-1])
    return found


def test_every_sample_is_in_one_batch_and_processes_have_equally_many_batches():
    for samples, size, processes in NUMBERS:
        found = shares(samples, size, processes)
        assert len({len(batches) for batches in found}) == 1, (samples, size, processes)
        flat = [batch for batches in found for batch in batches]
        assert sorted(i for batch in flat for i in batch) == list(range(samples)), (samples, size, processes)
        assert all(1 <= len(batch) <= size for batch in flat), (samples, size, processes)


def test_number_of_batches_is_minimal():
    for samples, size, processes in NUMBERS:
        assert len(batch_sizes(samples, size, processes=processes, drop_last=False)) == (
            -(-samples // (size * processes)) * processes
        )


def test_drop_last_leaves_out_incomplete_batches():
    assert shares(11, 2, 2, drop_last=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert shares(5, 2, 1, drop_last=True, window=1, times=2) == [[[0, 1], [0, 1], [2, 3], [2, 3]]]


def test_windows_are_repeated_together_on_all_processes():
    assert shares(10, 1, 2, times=2)[0] == [[0], [2], [0], [2], [4], [6], [4], [6], [8]]


@pytest.mark.parametrize(("samples", "size", "processes"), [(9, 1, 2), (3, 4, 4)])
def test_samples_that_give_processes_unequal_batches_are_refused(samples, size, processes):
    with pytest.raises(ConfigError, match=r"custom.train_jsonl.*trained on twice.*dataloader_drop_last to true"):
        batch_sizes(samples, size, processes=processes, drop_last=False)


def test_full_windows_are_repeated_and_last_partial_window_is_not():
    a, b, c, d = [[i] for i in range(4)]
    assert shares(4, 1, 1, window=3, times=2) == [[a, b, c, a, b, c, d]]


@pytest.mark.parametrize("count", range(1, 14))
@pytest.mark.parametrize(("window", "times", "size"), [(1, 3, 1), (2, 2, 1), (3, 4, 2), (4, 1, 3)])
def test_each_sample_is_used_m_times_in_full_windows_and_once_in_partial_window(count, window, times, size):
    seen = Counter(i for batch in shares(count, size, 1, window=window, times=times)[0] for i in batch)
    in_full_windows = -(-count // size) // window * window * size
    assert seen == {i: times if i < in_full_windows else 1 for i in range(count)}


def test_window_resumed_midway_has_fewer_uses_left():
    assert [uses_left(n, batches=14, window=2, times=3) for n in range(0, 14, 2)] == [3, 2, 1, 3, 2, 1, 1]
