"""What a person asks of `stage2 init`, and its check. Nothing heavy is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from stage2_api.errors import ConfigError, Problem
from stage2_api.kubernetes_types import MountPath
from stage2_trainer.data.files import check_folder

MOST_GPUS = 16
HELD_OUT, TRAINED, PAGE = "data/val.jsonl", "models/stage2", "runs/stage2.html"
"""Paths in a project: the held-out records, the model of stage 2, and its report."""
NEXT_STEPS = (
    ("doctor stage1.yaml", "models/stage1"),
    ("run stage1.yaml --work-dir runs/stage1-work", "models/stage1"),
    ("export runs/stage1 --output models/stage1", "models/stage1"),
    ("run stage2.yaml --work-dir runs/stage2-work", TRAINED),
    (f"report runs/stage2 --html {PAGE}", None),
    (f"export runs/stage2 --output {TRAINED}", TRAINED),
)
"""Commands of stage2 that follow in a new project, each with the folder after which it need not run again."""
_MOUNTS: TypeAdapter[str] = TypeAdapter(MountPath)


@dataclass(frozen=True)
class ProjectRequest:
    """The input of a project.

    data, held_out: data files, as `stage2 import` writes them; without held_out, a share of the records is held out.
    images: folders of images that are not in the folder of their data file. gpus: of the machine.
    """

    data: Path
    held_out: Path | None
    model: str
    gpus: int
    output: Path
    images: tuple[Path, ...] = ()


def check_request(request: ProjectRequest, *, imported: bool = False) -> None:
    """Raise ConfigError for every option that is wrong. imported: an import of the data checks these itself."""
    problems: list[Problem] = []
    try:
        check_folder("--output", request.output)
    except ConfigError as error:
        problems += error.problems
    if not 0 <= request.gpus <= MOST_GPUS:
        rule = f"must be the GPUs of one machine, 0 to {MOST_GPUS}"
        problems.append(Problem("--gpus", request.gpus, rule, "0 trains a tiny model on the CPU"))
    for option, file in (("--data", None if imported else request.data), ("--val-data", request.held_out)):
        if file is not None and not os.path.isfile(file):
            way_out = "`stage2 import` writes one from annotations of other forms"
            problems.append(Problem(option, str(file), "must be a data file (.jsonl)", way_out))
    for folder in request.images:
        if not os.path.isdir(folder):
            problems.append(Problem("--images", str(folder), "must be a folder", "check the path"))
    problems += [problem for folder in request.images for problem in unmountable("--images", folder)]
    problems += unmountable("--output", request.output)
    if problems:
        raise ConfigError(problems)


def unmountable(option: str, path: Path) -> list[Problem]:
    """Return a problem where containers cannot have a folder at its path on this machine."""
    try:
        _MOUNTS.validate_python(str(path.resolve()))
    except ValidationError:
        rule = f"is mounted at {str(path.resolve())!r}, which must be text of at most 4,096 characters without a colon"
        return [Problem(option, str(path), rule, "name another folder, or move it")]
    return []
