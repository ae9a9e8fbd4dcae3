"""The data files and the model folder that a configuration names, looked over where this machine has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_cli.file_progress import file_progress
from stage2_report.inspection import KEY_OF_KIND
from stage2_trainer.data.model_trust import model_problems
from stage2_trainer.data.survey import Survey, survey
from stage2_trainer.preflight import record_rules

FIRST_RECORDS = 1000

Local = Callable[[Path], Path | None]
"""A function that finds a path of a configuration on this machine; None where it lies in something that is not here."""


@dataclass
class Findings:
    """A report on the data files: a line for each, and all problems of those that are here."""

    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def look_over(config: RunConfig, local: Local, *, all_records: bool) -> Findings:
    """Look over the model's folder, and the first records of each data file, or all that the run would read."""
    custom, found = config.custom, Findings()
    named = (
        ("custom.train_jsonl", custom.train_jsonl, custom.train_sample_limit),
        ("custom.val_jsonl", custom.val_jsonl, custom.val_sample_limit),
    )
    model = local(Path(config.model.model))
    if model is not None and os.path.isdir(model):
        found.problems += model_problems(config.model, model)
    for key, path, limit in named:
        if path is None:
            continue
        here = local(Path(path))
        if here is None or not os.path.exists(here):
            found.lines.append(f"  {key}: {path}: not here, not checked")
            continue
        reads = limit if all_records else min(limit or FIRST_RECORDS, FIRST_RECORDS)
        try:
            with file_progress(here, shown=all_records) as on_line:
                one = survey(here, record_rules(config), reads, on_line)
        except ConfigError as error:
            found.problems += error.problems
            continue
        found.problems += one.problems
        found.lines.append(f"  {key}: {here}: {_counts(one)}{_left(one, reads, limit)}")
    return found


def _counts(one: Survey) -> str:
    parts = [f"{one.records:,} right record{'' if one.records == 1 else 's'}"]
    if one.broken:
        parts.append(f"{len(one.broken):,} broken")
    total = sum(one.objects.values())
    kinds = ", ".join(f"{count:,} {KEY_OF_KIND[kind]}" for kind, count in sorted(one.objects.items()))
    parts.append(f"{total:,} object{'' if total == 1 else 's'}" + (f" ({kinds})" if kinds else ""))
    return ", ".join(parts)


def _left(one: Survey, reads: int | None, limit: int | None) -> str:
    """What follows the counts where the run would read on."""
    if one.whole or reads == limit:
        return ""
    return f"; these are the first {reads:,} records, --all-records reads on"
