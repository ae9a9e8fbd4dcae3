"""Sizes of an epoch's batches, so that every learner process gets equally many batches."""

from __future__ import annotations

from stage2_api.errors import ConfigError, Problem


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
