"""`stage2 validate`: the rules that `kubectl apply` and the learner's start apply, where the person is.

Data files are looked over where this machine has them; a job names them by the paths of its containers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stage2_api.advice import idle_settings
from stage2_api.errors import EXIT_CONFIG, ConfigError
from stage2_api.parsing import parse_job, parse_run_config
from stage2_api.runconfig import RunConfig
from stage2_cli.config_files import is_job, load_documents, only_document, with_bases
from stage2_cli.data_files import Local, look_over
from stage2_cli.errors import show_config_error, show_idle_settings
from stage2_cli.paths import parse_mappings, place_here
from stage2_cli.plain_console import plain_console
from stage2_controller.spec import template_rules


@dataclass(frozen=True)
class _Checked:
    """A configuration that keeps the rules, and where its paths lie on this machine."""

    config: RunConfig
    local: Local


def validate_files(files: Sequence[Path], *, mapped: Sequence[str] = (), all_records: bool = False) -> int:
    """Check every file, and the data files that it names; 0 when all are right, 64 otherwise.

    mapped: `CONTAINER=LOCAL`, where paths of a job's containers lie. all_records: read data files to their end.
    """
    places = parse_mappings(mapped)
    wrong = [path for path in files if not _valid(path, places, all_records=all_records)]
    return EXIT_CONFIG if wrong else 0


def _valid(path: Path, places: Mapping[str, Path], *, all_records: bool) -> bool:
    """Check one file, and say what there is to say about it."""
    try:
        kind, checked = _checked(path, places)
    except ConfigError as error:
        show_config_error(error, source=str(path))
        return False
    found = [look_over(one.config, one.local, all_records=all_records) for one in checked]
    problems = [problem for one in found for problem in one.problems]
    out = plain_console()
    out.print(f"{path}: {'broken data of a' if problems else 'valid'} {kind}")
    for line in (line for one in found for line in one.lines):
        out.print(line)
    if problems:
        show_config_error(ConfigError(problems), source=str(path))
    for one in checked:
        show_idle_settings(idle_settings(one.config))
    return not problems


def _checked(path: Path, places: Mapping[str, Path]) -> tuple[str, list[_Checked]]:
    documents = load_documents(path)
    if not is_job(documents[0]):
        config = parse_run_config(with_bases(path, only_document(path, documents)))
        return "training configuration", [_Checked(config, lambda named: named)]
    jobs = [parse_job(document) for document in documents]
    for job in jobs:
        template_rules.check(job)
    return "RolloutMatchingJob", [_Checked(job.spec.config, partial(place_here, job, places)) for job in jobs]
