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
_MOUNTS: TypeAdapter[str] = TypeAdapter(MountPath)


@dataclass(frozen=True)
class Annotations:
    """A COCO file and the folder of its images."""

    file: Path
    images: Path


@dataclass(frozen=True)
class ProjectRequest:
    """The input of a project. held_out: None = a share of the training images. gpus: of the machine."""

    train: Annotations
    held_out: Annotations | None
    model: str
    gpus: int
    output: Path
    max_objects: int | None = None


def check_request(request: ProjectRequest) -> None:
    """Raise ConfigError for every option that is wrong."""
    problems: list[Problem] = []
    try:
        check_folder("--output", request.output)
    except ConfigError as error:
        problems += error.problems
    if not 0 <= request.gpus <= MOST_GPUS:
        rule = f"must be the GPUs of one machine, 0 to {MOST_GPUS}"
        problems.append(Problem("--gpus", request.gpus, rule, "0 trains a tiny model on the CPU"))
    pairs = [("--coco", "--images", request.train)]
    pairs += [("--val-coco", "--val-images", request.held_out)] if request.held_out else []
    for file, folder, one in pairs:
        if not os.path.isfile(one.file):
            problems.append(Problem(file, str(one.file), "must be an annotation file", "check the path"))
        if not os.path.isdir(one.images):
            problems.append(Problem(folder, str(one.images), "must be a folder", "check the path"))
    problems += unmountable("--output", request.output)
    problems += [problem for _, option, one in pairs for problem in unmountable(option, one.images)]
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
