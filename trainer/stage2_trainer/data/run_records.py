"""The records of a run, and the check that the sizes which they state are those of their images.

An image's header states its size without its pixels, in a few kilobytes of the file. `stage2 data` and `stage2
validate` compare every image, the start of a run compares `LOOKED_AT` records spread over the file, and each image is
compared again before it is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.images import ImageError, read_header
from stage2_trainer.data.records import (
    MAX_REPORTED_PROBLEMS,
    Fingerprint,
    Record,
    RecordRules,
    fingerprint,
    lines,
    load_records,
)
from stage2_trainer.process.activity import ACTIVITY

LOOKED_AT = 1000
THREADS = 8  # reading from a network drive mostly waits
T = TypeVar("T")
Size = tuple[int, int]


@dataclass(frozen=True)
class RunRecords:
    """Training records, held-out records (empty without evaluation), and the fingerprint of the former."""

    train: list[Record]
    held_out: list[Record]
    fingerprint: Fingerprint


def load_run_records(config: RunConfig, rules: RecordRules) -> RunRecords:
    """Read the records of a run. Raises ConfigError that names every broken line of both files (at most 20 of each).

    The sizes of some records, spread over each file, are compared with the headers of their images.
    """
    custom = config.custom
    train, problems = _load(custom.train_jsonl, custom.train_sample_limit, rules)
    held_out, more = _load(custom.val_jsonl, custom.val_sample_limit, rules) if custom.val_jsonl else ([], ())
    if problems or more:
        raise ConfigError([*problems, *more])
    return RunRecords(train, held_out, fingerprint(custom.train_jsonl, train))


def _load(path: str, limit: int | None, rules: RecordRules) -> tuple[list[Record], Sequence[Problem]]:
    try:
        with ACTIVITY.doing(f"reading {path}"):
            records = load_records(path, limit, rules)
    except ConfigError as error:
        return [], error.problems
    return records, size_problems(path, records)


def other_size(record: Record) -> Size | None:
    """Return the size of a record's image, as displayed, if the record states another; one of several must have it.

    None if the record states no size, or an image cannot be read, which decoding reports.
    """
    stated, shown = (record.width, record.height), (0, 0)
    if stated == (0, 0):
        return None
    for source in reversed(record.images):
        try:
            shown = read_header(source).size
        except ImageError:
            return None
        if shown == stated:
            return None
    return shown


def size_fault(record: Record) -> ImageError | None:
    """Return the error of a record that states another size than its image; see `other_size`."""
    shown = other_size(record)
    way_out = "correct the record's width and height"
    return shown and ImageError.at(record.images[0], compared_sizes(record, shown), way_out=way_out)


def compared_sizes(record: Record, shown: Size) -> str:
    """Describe both sizes."""
    return f"{_as_text(shown)} as it is shown, where its record says {_as_text((record.width, record.height))}"


def size_problem(where: str, record: Record, shown: Size) -> Problem:
    """Return the problem of the record at `where` (`file:line`)."""
    rule = f"its image has {_as_text(shown)} as it is shown, after EXIF"
    way_out = "correct width and height, and coordinates that were made with them, or remove the record"
    return Problem(f"{where} width, height", _as_text((record.width, record.height)), rule, way_out)


def size_problems(path: Path | str, records: Sequence[Record]) -> list[Problem]:
    """Compare at most `LOOKED_AT` records, spread over the file, with the headers of their images."""
    chosen = spread(records, LOOKED_AT)
    compared: list[tuple[Record, Size | None]] = []
    comparing = ACTIVITY.doing(f"comparing the sizes in {path} with those of the images", len(chosen), "records")
    with comparing as doing, ThreadPoolExecutor(THREADS) as threads:
        for record, shown in zip(chosen, threads.map(other_size, chosen), strict=True):
            compared.append((record, shown))
            doing.advance()
    wrong = [(record, shown) for record, shown in compared if shown is not None][:MAX_REPORTED_PROBLEMS]
    if not wrong:
        return []
    numbers = {line.position: line.number for line in islice(lines(path), wrong[-1][0].index + 1)}
    return [size_problem(f"{path}:{numbers[record.index]}", record, shown) for record, shown in wrong]


def spread(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` items, at equal distances."""
    return items[:: max(1, -(-len(items) // most))]


def _as_text(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def batch_sizes(samples: int, batch_size: int, *, processes: int, drop_last: bool) -> list[int]:
    """Return the sizes of an epoch's batches: full ones, and the last one or two of each process as even as can be.

    Raises ConfigError if there are fewer samples than batches.

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
