"""`stage2 validate`: checks the rules of `kubectl apply` and of the learner's start locally.

Data files and the model folder are checked too if they are on this machine; a job refers to them by container paths.
Names of rewards must be those of stage2, or of a package that is installed here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stage2_api.advice import idle_settings
from stage2_api.errors import EXIT_CONFIG, ConfigError, Problem
from stage2_api.parsing import parse_job, parse_run_config
from stage2_api.runconfig import RunConfig
from stage2_cli.config_files import changed, is_job, load_documents, only_document, with_bases
from stage2_cli.console import file_progress, plain_console, show_config_error, show_idle_settings
from stage2_cli.paths import local_path, parse_mappings
from stage2_controller.spec import template_rules
from stage2_report.inspection import KEY_OF_KIND
from stage2_trainer.data.model_files import model_problems
from stage2_trainer.data.profile import Survey, survey
from stage2_trainer.preflight import check_rewards, record_rules

FIRST_RECORDS = 1000

Local = Callable[[Path], Path | None]
"""Maps a configured path to a local path; None for a path in a volume of another machine."""


@dataclass
class Findings:
    """A report on the data files: one line each, and the problems of local files."""

    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def validate_files(
    files: Sequence[Path], *, mapped: Sequence[str] = (), changes: Sequence[str] = (), all_records: bool = False
) -> int:
    """Check every file and its data files; return 0 if all are valid, else 64.

    mapped: `CONTAINER=LOCAL`, for paths of a job's containers. changes: of `--set`, for every file. all_records: read
    data files to their end.
    """
    mappings = parse_mappings(mapped)
    invalid = [path for path in files if not _is_valid(path, mappings, changes, all_records=all_records)]
    return EXIT_CONFIG if invalid else 0


def _is_valid(path: Path, mappings: Mapping[str, Path], changes: Sequence[str], *, all_records: bool) -> bool:
    """Check one file, and print the result."""
    try:
        kind, configs = _load(path, mappings, changes)
    except ConfigError as error:
        show_config_error(error, source=str(path))
        return False
    findings = [check_data(config, local, all_records=all_records) for config, local in configs]
    problems = [problem for one in findings for problem in one.problems]
    out = plain_console()
    out.print(f"{path}: {'broken data of a' if problems else 'valid'} {kind}")
    for line in (line for one in findings for line in one.lines):
        out.print(line)
    if problems:
        show_config_error(ConfigError(problems), source=str(path))
    for config, _ in configs:
        show_idle_settings(idle_settings(config))
    return not problems


def _load(
    path: Path, mappings: Mapping[str, Path], changes: Sequence[str]
) -> tuple[str, list[tuple[RunConfig, Local]]]:
    """Return the kind of a file and its valid configurations. Raises ConfigError."""
    documents = load_documents(path)
    if not is_job(documents[0]):
        config = parse_run_config(changed(with_bases(path, only_document(path, documents)), changes))
        check_rewards(config)
        return "training configuration", [(config, lambda named: named)]
    jobs = [parse_job(changed(document, changes)) for document in documents]
    for job in jobs:
        template_rules.check(job)
        check_rewards(job.spec.config, root="spec.config.")
    return "RolloutMatchingJob", [(job.spec.config, partial(local_path, job, mappings)) for job in jobs]


def check_data(config: RunConfig, local: Local, *, all_records: bool) -> Findings:
    """Check the model folder, and the first records of each data file, or all that the run reads."""
    findings = Findings()
    model = local(Path(config.model.model))
    if model is not None and os.path.isdir(model):
        findings.problems += model_problems(config.model, model)
    for key, path, limit in _data_files(config):
        here = local(Path(path))
        if here is None or not os.path.exists(here):
            findings.lines.append(f"  {key}: {path}: not on this machine, not checked")
            continue
        most = limit if all_records else min(limit or FIRST_RECORDS, FIRST_RECORDS)
        try:
            with file_progress(here, shown=all_records) as on_line:
                found = survey(here, record_rules(config), most, on_line)
        except ConfigError as error:
            findings.problems += error.problems
            continue
        findings.problems += found.problems
        rest = "" if found.whole or most == limit else f"; only the first {most:,} records, --all-records reads all"
        findings.lines.append(f"  {key}: {here}: {_counts(found)}{rest}")
    return findings


def _data_files(config: RunConfig) -> Iterator[tuple[str, str, int | None]]:
    custom = config.custom
    yield "custom.train_jsonl", custom.train_jsonl, custom.train_sample_limit
    if custom.val_jsonl is not None:
        yield "custom.val_jsonl", custom.val_jsonl, custom.val_sample_limit


def _counts(found: Survey) -> str:
    parts = [f"{found.records:,} valid record{'' if found.records == 1 else 's'}"]
    if found.broken:
        parts.append(f"{len(found.broken):,} broken")
    total = sum(found.objects.values())
    kinds = ", ".join(f"{count:,} {KEY_OF_KIND[kind]}" for kind, count in sorted(found.objects.items()))
    parts.append(f"{total:,} object{'' if total == 1 else 's'}" + (f" ({kinds})" if kinds else ""))
    return ", ".join(parts)
