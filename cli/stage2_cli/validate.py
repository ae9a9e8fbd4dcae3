"""`stage2 validate`: the rules that `kubectl apply` and the learner's start apply, where the person is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from stage2_api.errors import EXIT_CONFIG, ConfigError
from stage2_api.extends import resolve_extends
from stage2_api.job import parse_job
from stage2_api.runconfig import parse_run_config

from stage2_cli.errors import show_config_error
from stage2_cli.files import is_job, load_documents, load_yaml


def validate_files(files: Sequence[Path]) -> int:
    """Check every file; 0 when all are right, 64 otherwise."""
    wrong = 0
    for path in files:
        try:
            kind = _validate(path)
        except ConfigError as error:
            show_config_error(error, source=str(path))
            wrong += 1
        else:
            Console(soft_wrap=True, highlight=False).print(f"{path}: valid {kind}")
    return EXIT_CONFIG if wrong else 0


def _validate(path: Path) -> str:
    documents = load_documents(path)
    if not is_job(documents[0]):
        parse_run_config(resolve_extends(path, load_yaml))
        return "training configuration"
    for document in documents:
        parse_job(document)
    return "RolloutMatchingJob"
