"""`stage2 doctor`: what a run needs, and whether this machine has it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from stage2_api.errors import EXIT_CONFIG, refused
from stage2_api.job import RolloutMatchingJob
from stage2_api.runconfig import RunConfig
from stage2_cli.config_files import load
from stage2_cli.paths import PathMap, host_paths, parse_mappings
from stage2_cli.processes import asks_for_gpus, gpus_hidden
from stage2_report.run_history import find_log, read_records
from stage2_report.terminal import Terminal, print_json
from stage2_trainer.checks.division import WHAT, check_division
from stage2_trainer.checks.examination import Devices, Examination, Requirement
from stage2_trainer.checks.resources import Machine
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.cuda_driver import visible_names
from stage2_trainer.telemetry.run_log import STEP_LOG

STYLES = {"good": "green", "doubtful": "yellow", "missing": "red"}


def examine(
    file: Path,
    *,
    mapped: Sequence[str],
    changes: Sequence[str],
    as_json: bool = False,
    cpu: bool = False,
    log: Path | None = None,
) -> int:
    """Print what a job, or a training YAML, needs; return 0, or EXIT_CONFIG where something is missing.

    cpu: whether to use no GPU, as `stage2 run --cpu`. log: a run's folder or log, by which divisions of a job's GPUs
    are compared, in place of the one in its output folder.

    Raises ConfigError where the file breaks a rule, `log` names no log, or there are no GPUs to divide by it.
    """
    mappings = parse_mappings(mapped)
    found = load(file, changes)
    with gpus_hidden(cpu or not (isinstance(found, RunConfig) or asks_for_gpus(found))):
        return _examine(found, mappings, as_json=as_json, log=None if log is None else find_log(log, "--log"))


def _examine(
    found: RolloutMatchingJob | RunConfig, mappings: Mapping[str, Path], *, as_json: bool, log: Path | None
) -> int:
    cpu = visible_names(os.environ) == []
    if isinstance(found, RunConfig):
        examination = Examination(found, Machine.detect(), cpu=cpu)
    else:
        spec = found.spec
        servers, on_gpus = spec.rollout, asks_for_gpus(found)
        devices = Devices(servers.servers, servers.gpus_per_server, spec.learner.gpus, on_gpus)
        paths = PathMap({**host_paths(found), **mappings})
        config = RunConfig.model_validate(paths.localise(spec.config.model_dump(exclude_unset=True)))
        examination = Examination(config, Machine.detect(), devices, cpu)
    division = _division(found, examination, log or Path(examination.config.training.output_dir) / STEP_LOG)
    if log is not None and not division:
        rule = "compares divisions of one node's GPUs between servers and learner, and this run has none to divide"
        raise refused("--log", str(log), rule, "leave it out")
    findings = [*examination.findings(), *division]
    code = EXIT_CONFIG if any(finding.verdict == "missing" for finding in findings) else os.EX_OK
    if as_json:
        print_json([asdict(finding) for finding in findings], indent=2)
        return code
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "", ""):
        table.add_column(name, overflow="fold")
    for finding in findings:
        status = finding.status if finding.verdict == "good" else f"{finding.status}; {finding.way_out}"
        table.add_row(Text(finding.verdict, STYLES[finding.verdict]), finding.what, status)
    Terminal().print(table)
    return code


def _division(job: RolloutMatchingJob | RunConfig, examination: Examination, log: Path) -> Sequence[Requirement]:
    """Return how a job on one node divides its GPUs, compared with other divisions by a log that need not exist yet."""
    if examination.devices is None or examination.cpu:
        return ()
    if isinstance(job, RolloutMatchingJob) and job.spec.engine != "Node":
        return ()
    try:
        with ACTIVITY.doing("reading the run's log"):
            records = read_records(log) if log.is_file() else ()
            return [*check_division(examination.config, examination.devices, records)]
    except OSError as error:
        return [Requirement(WHAT, "doubtful", f"{log}: {error.strerror}", "let this user read the run's log")]
