"""The records of a run: those that it trains on, and those that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.image_headers import size_problems
from stage2_trainer.data.records import Fingerprint, Record, RecordRules, fingerprint, load_records


@dataclass(frozen=True)
class RunRecords:
    """Training records, held-out records (none: no evaluation), and the fingerprint of the former."""

    train: list[Record]
    held_out: list[Record]
    fingerprint: Fingerprint


def load_run_records(config: RunConfig, rules: RecordRules) -> RunRecords:
    """Read the records of a run. Raises ConfigError that names every broken line of both files (at most 20 of each).

    Of each file the sizes of some records, spread over it, are compared with their images' headers.
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
