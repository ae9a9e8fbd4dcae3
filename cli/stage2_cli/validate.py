"""`stage2 validate`: the rules that `kubectl apply` and the learner's start apply, where the person is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from stage2_api.advice import idle_settings
from stage2_api.errors import EXIT_CONFIG, ConfigError
from stage2_api.extends import resolve_extends
from stage2_api.parsing import parse_job, parse_run_config
from stage2_api.runconfig import RunConfig
from stage2_cli.errors import show_config_error, show_idle_settings
from stage2_cli.files import is_job, load_documents, load_yaml
from stage2_controller.job import template_rules


def validate_files(files: Sequence[Path]) -> int:
    """Check every file; 0 when all are right, 64 otherwise."""
    wrong = 0
    for path in files:
        try:
            kind, configs = _validate(path)
        except ConfigError as error:
            show_config_error(error, source=str(path))
            wrong += 1
            continue
        Console(soft_wrap=True, highlight=False).print(f"{path}: valid {kind}")
        for config in configs:
            show_idle_settings(idle_settings(config))
    return EXIT_CONFIG if wrong else 0


def _validate(path: Path) -> tuple[str, list[RunConfig]]:
    documents = load_documents(path)
    if not is_job(documents[0]):
        return "training configuration", [parse_run_config(resolve_extends(path, load_yaml))]
    jobs = [parse_job(document) for document in documents]
    for job in jobs:
        template_rules.check(job)
    return "RolloutMatchingJob", [job.spec.config for job in jobs]
