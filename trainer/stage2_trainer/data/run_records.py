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

LOOKED_AT = 1000
THREADS = 8  # reading from a network drive mostly waits
T = TypeVar("T")


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
    train, problems = _loaded(custom.train_jsonl, custom.train_sample_limit, rules)
    held_out, more = _loaded(custom.val_jsonl, custom.val_sample_limit, rules) if custom.val_jsonl else ([], ())
    if problems or more:
        raise ConfigError([*problems, *more])
    return RunRecords(train, held_out, fingerprint(custom.train_jsonl, train))


def _loaded(path: str, limit: int | None, rules: RecordRules) -> tuple[list[Record], Sequence[Problem]]:
    try:
        records = load_records(path, limit, rules)
    except ConfigError as error:
        return [], error.problems
    return records, size_problems(path, records)


class SizeError(ImageError):
    """An image has another size than its record states."""

    def __init__(self, source: str, stated: tuple[int, int], found: tuple[int, int]) -> None:
        self.stated, self.found = stated, found
        super().__init__(source, self.words(stated, found), way_out="correct the record's width and height")

    @staticmethod
    def words(stated: tuple[int, int], found: tuple[int, int]) -> str:
        """Describe both sizes."""
        return f"{_by(found)} as it is shown, where its record says {_by(stated)}"


def size_fault(record: Record) -> SizeError | None:
    """Return the error of a record that states another size than its image, as displayed; one of several must have it.

    None if the record states no size, or an image cannot be read: whoever decodes it reports that.
    """
    stated, found = (record.width, record.height), (0, 0)
    if stated == (0, 0):
        return None
    for source in reversed(record.images):
        try:
            found = read_header(source).size
        except ImageError:
            return None
        if found == stated:
            return None
    return SizeError(record.images[0], stated, found)


def size_problem(where: str, fault: SizeError) -> Problem:
    """Return the problem of the record at `where` (`file:line`)."""
    rule = f"its image has {_by(fault.found)} as it is shown, after EXIF"
    way_out = "correct width and height, and coordinates that were made with them, or remove the record"
    return Problem(f"{where} width, height", _by(fault.stated), rule, way_out)


def size_problems(path: Path | str, records: Sequence[Record], most: int = LOOKED_AT) -> list[Problem]:
    """Compare at most `most` records, spread over the file, with the headers of their images."""
    with ThreadPoolExecutor(THREADS) as threads:
        faults = list(threads.map(_placed_fault, spread(records, most)))
    found = dict(islice((one for one in faults if one is not None), MAX_REPORTED_PROBLEMS))
    if not found:
        return []
    return [
        size_problem(f"{path}:{line.number}", found[line.position])
        for line in islice(lines(path), max(found) + 1)
        if line.position in found
    ]


def spread(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` items, at equal distances."""
    return items[:: max(1, -(-len(items) // most))]


def _placed_fault(record: Record) -> tuple[int, SizeError] | None:
    fault = size_fault(record)
    return None if fault is None else (record.index, fault)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


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
