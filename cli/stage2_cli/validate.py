"""`stage2 validate`: checks the rules of `kubectl apply` and of the learner's start locally.

Of a job it also builds the pods, and looks at where they write and read and whether a node would start them. Data files
and the model folder are checked too if they are on this machine; a job refers to them by container paths.
Rewards must be those of stage2, of a package that is installed here, or of a file beside the configuration. Those of
packages score an answer. Files with rewards are read but never run, because they may be a stranger's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stage2_api.advice import idle_settings
from stage2_api.errors import EXIT_CONFIG, ConfigError, Problem
from stage2_api.grpo import reward_file
from stage2_api.parsing import parse_job, parse_run_config
from stage2_api.rules.grpo_batches import round_problems
from stage2_api.runconfig import RunConfig
from stage2_cli.config_files import completed, is_job, jobs_and_others, load_documents, only_document, with_bases
from stage2_cli.console import file_progress, show_config_error, show_idle_settings, show_warnings
from stage2_cli.paths import local_path, parse_mappings
from stage2_controller.children.examination import examined
from stage2_controller.job import output_folder, template_rules
from stage2_report.inspection import KEY_OF_KIND
from stage2_report.terminal import Terminal, print_json
from stage2_trainer.checks.preflight import check_rewards, record_rules, try_rewards
from stage2_trainer.checks.supported import deepspeed_problems
from stage2_trainer.data.model_files import model_problems
from stage2_trainer.data.profile import Survey, survey
from stage2_trainer.data.records import AS_DECLARED, RecordRules, load_record
from stage2_trainer.grpo.rewards import known_rewards
from stage2_trainer.model.deepspeed_config import deepspeed_file

FIRST_RECORDS = 1000
DATA_FILE = ".jsonl"
TRAIN = "custom.train_jsonl"

Local = Callable[[Path], Path | None]
"""Maps a configured path to a local path; None for a path in a volume of another machine."""


@dataclass
class Findings:
    """What was found in one file. kind: of the file; None where it breaks a rule. unlisted: number of more problems."""

    kind: str | None = None
    problems: list[Problem] = field(default_factory=list)
    unlisted: int = 0
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    advice: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


def validate_files(
    files: Sequence[Path],
    *,
    mapped: Sequence[str] = (),
    changes: Sequence[str] = (),
    all_records: bool = False,
    as_json: bool = False,
) -> int:
    """Check every file and its data files, and print the results; return 0 if all are valid, else 64.

    mapped: `CONTAINER=LOCAL`, for paths of a job's containers. changes: of `--set`, for every file. all_records: read
    data files to their end.
    """
    mappings = parse_mappings(mapped)
    results = []
    for path in files:
        findings = _examine(path, mappings, changes, all_records=all_records)
        results.append({"file": str(path), "valid": not findings.problems, **_document(findings)})
        if not as_json:
            _print(path, findings)
    if as_json:
        print_json(results, indent=2)
    return os.EX_OK if all(result["valid"] for result in results) else EXIT_CONFIG


def _examine(path: Path, mappings: Mapping[str, Path], changes: Sequence[str], *, all_records: bool) -> Findings:
    if path.suffix == DATA_FILE:
        data = Findings()
        _check_records(data, "records", path, AS_DECLARED, None, all_records=all_records)
        data.kind = None if data.problems else "data file"
        return data
    findings = Findings()
    try:
        configs = _load(path, mappings, changes, findings)
    except ConfigError as error:
        return Findings(problems=list(error.problems), unlisted=error.unlisted)
    for config, local in configs:
        check_data(config, local, findings, all_records=all_records)
        findings.not_checked += unchecked_rewards(config)
        findings.advice += idle_settings(config)
    findings.not_checked.append("GPUs, memory, disk and ports: `stage2 doctor` checks them where the run will be")
    return findings


def _document(findings: Findings) -> dict[str, Any]:
    """Return findings for programs. A value is text: YAML has values that JSON has not."""
    parts = {"problems": findings.problems, "advice": findings.advice, "warnings": findings.warnings}
    listed = {key: [{**vars(one), "value": one.shown_value} for one in part] for key, part in parts.items()}
    return {**vars(findings), **listed}


def _print(path: Path, findings: Findings) -> None:
    if findings.kind is not None:
        out = Terminal()
        out.print(f"{path}: {'broken data of a' if findings.problems else 'valid'} {findings.kind}")
        for line in (*findings.checked, *(f"not checked: {line}" for line in findings.not_checked)):
            out.print(f"  {line}")
    if findings.problems:
        show_config_error(ConfigError(findings.problems, unlisted=findings.unlisted), source=str(path))
    show_idle_settings(findings.advice)
    show_warnings(findings.warnings)


def _load(
    path: Path, mappings: Mapping[str, Path], changes: Sequence[str], findings: Findings
) -> list[tuple[RunConfig, Local]]:
    """Return the valid configurations of a file; add its kind, its warnings and what only an image has to `findings`.

    Raises:
        ConfigError: it breaks a rule.
    """
    documents = load_documents(path)
    if not is_job(documents[0]):
        config = parse_run_config(completed(path, with_bases(path, only_document(path, documents)), changes))
        check_rewards(config, runs_files=False)
        findings.kind = "training configuration"
        return [(config, lambda named: named)]
    written, others = jobs_and_others(documents)
    jobs = [parse_job(completed(path, document, changes)) for document in written]
    for job in jobs:
        template_rules.check(job)
        check_rewards(job.spec.config, root="spec.config.", runs_files=False)
    seen = [examined(job) for job in jobs]
    if problems := [problem for one in seen for problem in one.problems]:
        raise ConfigError(problems)
    findings.kind = "RolloutMatchingJob"
    findings.warnings += [warning for job in jobs for warning in output_folder.warnings(job)]
    findings.not_checked += [", ".join(others)] if others else []
    in_image = [path for one in seen for path in one.in_image]
    findings.not_checked += [f"{key}: {file}: in no volume: the job's image must have it" for key, file in in_image]
    return [(job.spec.config, partial(local_path, job, mappings)) for job in jobs]


def unchecked_rewards(config: RunConfig) -> list[str]:
    """Return a line for each reward of a package, which may be missing elsewhere, and for each in a file."""
    return [
        f"rlhf.reward_funcs: {name}: a package of this machine adds it, and the job's image needs that package too"
        for name in _added_rewards(config)
    ] + [
        f"rlhf.reward_funcs: {name}: its file was read, and not run: `stage2 inspect CONFIG --rewards --sample 0"
        " --response-file FILE` lets it score an answer"
        for name in (config.rlhf.reward_funcs if config.rlhf is not None else ())
        if reward_file(name)
    ]


def _added_rewards(config: RunConfig) -> list[str]:
    """Return the names of a GRPO run's rewards that packages add."""
    names = config.rlhf.reward_funcs if config.rlhf is not None else ()
    return [name for name in names if name not in known_rewards() and not reward_file(name)]


def check_data(config: RunConfig, local: Local, findings: Findings, *, all_records: bool) -> None:
    """Check model folder and DeepSpeed configuration, and the first records of each data file, or all of the run's."""
    model = local(Path(config.model.model))
    if model is not None and os.path.isdir(model):
        findings.problems += model_problems(config.model, model)
    else:
        findings.not_checked.append(f"model.model: {config.model.model}: not on this machine")
    _check_deepspeed(config, local, findings)
    for key, path, limit in _data_files(config):
        here = local(Path(path))
        if here is None or not os.path.exists(here):
            findings.not_checked.append(f"{key}: {path}: not on this machine")
            continue
        found = _check_records(findings, key, here, record_rules(config), limit, all_records=all_records)
        if key == TRAIN and found is not None and not findings.problems:
            if config.rlhf is not None and found.whole:  # a round of several processes needs at least as many records
                findings.problems += round_problems(config, found.records, 1)
            _try_rewards(config, here, findings)


def _check_deepspeed(config: RunConfig, local: Local, findings: Findings) -> None:
    """Check the DeepSpeed configuration as the learner does before it imports DeepSpeed."""
    named = deepspeed_file(config)
    if named is not None and (named.suffix or len(named.parts) > 1):  # others are names of presets, which are no files
        here = local(named)
        if here is None or not here.exists():
            findings.not_checked.append(f"deepspeed: {named}: not on this machine")
            return
        config = config.model_copy(update={"deepspeed": str(here)})
    try:
        findings.problems += deepspeed_problems(config)
    except ConfigError as error:
        findings.problems += error.problems
    if config.uses_deepspeed:
        findings.not_checked.append("deepspeed: whether DeepSpeed itself takes its options: the learner asks it")


def _try_rewards(config: RunConfig, path: Path, findings: Findings) -> None:
    """Let the rewards of packages score answers to the first record."""
    added = _added_rewards(config)
    if not added:
        return
    try:
        try_rewards(config, load_record(path, 0, rules=record_rules(config)), runs_files=False)
    except ConfigError as error:
        findings.problems += error.problems
    else:
        findings.checked.append(
            f"rlhf.reward_funcs: {', '.join(added)}: score the first record's answer, and an empty one"
        )


def _check_records(
    findings: Findings, key: str, path: Path, rules: RecordRules, limit: int | None, *, all_records: bool
) -> Survey | None:
    """Check the first records of a data file, or all of the first `limit`; return them, or None for a broken file."""
    most = limit if all_records else min(limit or FIRST_RECORDS, FIRST_RECORDS)
    try:
        with file_progress(path, shown=all_records) as on_line:
            found = survey(path, rules, most, on_line)
    except ConfigError as error:
        findings.problems += error.problems
        return None
    findings.problems += found.problems
    rest = "" if found.whole or most == limit else f"; only the first {most:,} records, --all-records reads all"
    findings.checked.append(f"{key}: {path}: {_counts(found)}{rest}")
    return found


def _data_files(config: RunConfig) -> Iterator[tuple[str, str, int | None]]:
    custom = config.custom
    yield TRAIN, custom.train_jsonl, custom.train_sample_limit
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
