"""What a checkpoint's run was made of, written beside its weights, so that no other run goes on from it unnoticed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stage2_api.course import course_of
from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.model_files import model_fingerprint
from stage2_trainer.data.records import Fingerprint

logger = logging.getLogger(__name__)

FILE = "stage2_course.json"
WAY_OUT = (
    "set it back, name another training.output_dir, start anew with --overwrite, or go on all the same with"
    " training.resume: allow-changes"
)


def run_course(config: RunConfig, data: Fingerprint, *, world_size: int) -> dict[str, Any]:
    """Return what the weights of a run depend on: configuration path to value, data and model by what they hold."""
    found = course_of(config, world_size=world_size)
    found["custom.train_jsonl"] = f"{data.records} records, sha256 {data.sha256}"
    try:
        found["model.model"] = f"sha256 {model_fingerprint(config.model.model)}"
    except OSError as error:  # whoever loads it says so better
        logger.debug("no fingerprint of model.model: %s", error)
    return found


def write_course(course: Mapping[str, Any], checkpoint: Path) -> None:
    """Say in a checkpoint what its run is made of."""
    (checkpoint / FILE).write_text(json.dumps(dict(course), indent=1, ensure_ascii=False), encoding="utf-8")


def check_course(checkpoint: Path, course: Mapping[str, Any], *, allow_changes: bool) -> None:
    """Compare the run that wrote a checkpoint with the one that shall go on from it.

    A key that either of them lacks is not compared: it came or went with a version of stage2.

    Raises:
        ConfigError: they differ, and that is not allowed; with every difference.
    """
    try:
        written: dict[str, Any] = json.loads((checkpoint / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        logger.warning("%s does not say what its run was made of: nothing is compared", checkpoint)
        return
    now = json.loads(json.dumps(dict(course)))
    changed = {path: then for path, then in written.items() if path in now and now[path] != then}
    if not changed:
        return
    if allow_changes:
        for path, then in changed.items():
            logger.warning("%s: %r, and %r in %s (training.resume allows it)", path, now[path], then, checkpoint)
        return
    raise ConfigError(
        [Problem(path, now[path], f"the run of {checkpoint} has {then!r}", WAY_OUT) for path, then in changed.items()]
    )
