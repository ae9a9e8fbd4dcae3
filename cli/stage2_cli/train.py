"""`stage2 train`: from annotations to a model of stage 2, by the commands that a person would write.

Each step is a command of its own, printed before it runs. What a step has written stays, so the same line resumes.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from stage2_api.errors import EXIT_RETRYABLE, refused
from stage2_cli.steps import SIGNALLED, Step, check_same, run_undone, with_records
from stage2_report.terminal import Terminal
from stage2_trainer.prepare.project_request import HELD_OUT, NEXT_STEPS, PAGE, TRAINED, ProjectRequest
from stage2_trainer.process.cuda_driver import loaded_driver

_BOXES = "runs/boxes"


def train(request: ProjectRequest, changes: Sequence[str] = (), units: str | None = None) -> int:
    """Run all steps; return 0, or the exit code of the one that failed. Raises ConfigError.

    request: of the project; its `data` may also be annotations that `stage2 import` reads. changes: of `--set`, for
    the runs of both stages. units: of the annotations' coordinates.
    """
    _check_gpus(request.gpus)
    console, began = Terminal(), time.monotonic()
    project, here = request.output.absolute(), Path.cwd()
    for step in chain(_first_steps(request, units), _later_steps(project, changes)):
        if step.folder != here:
            console.print(f"$ cd {shlex.quote(os.path.relpath(step.folder, here))}", style="bold")
            here = step.folder
        if code := run_undone(step):
            Terminal(stderr=True).print(f"exit code {code} of: {step.line}; {_way_on(code)}")
            return code
    console.print(f"all steps took {time.monotonic() - began:,.0f} s; the model is {project / TRAINED}")
    console.print(f"boxes on a held-out picture: {project / _BOXES}")
    console.print(f"page: {project / PAGE}")
    return os.EX_OK


def _check_gpus(count: int) -> None:
    """Raise ConfigError if GPUs are asked for where there are none: before a large model is fetched for nothing."""
    if count and loaded_driver() is None:
        way_out = "0 trains a tiny model on the CPU; `stage2 init` writes the same project for a machine with GPUs"
        raise refused("--gpus", count, "are of this machine, which has no NVIDIA driver", way_out)


def _way_on(code: int) -> str:
    """Return what to do after a step that ended with this exit code."""
    if code > SIGNALLED:
        return "it was stopped; the same `stage2 train` goes on from here"
    if code == EXIT_RETRYABLE:
        return "another try may succeed: the same `stage2 train` goes on from here"
    return "correct what it reports; the same `stage2 train` then goes on from here"


def _first_steps(request: ProjectRequest, units: str | None) -> Iterator[Step]:
    """Yield the steps that create the project. Raises ConfigError for data that no import reads, or another project."""
    step, records = with_records(request, units)
    output = request.output
    check_same(request, units, records.data if step is not None else None)
    if step is not None:
        yield step
    options = [("--data", records.data), ("--val-data", request.held_out)]
    options += [("--images", one) for one in records.images]
    given = (word for option, value in options if value is not None for word in (option, str(value)))
    model = ("--model", request.model, "--gpus", str(request.gpus), "--output", str(output))
    yield Step(("init", *given, *model), Path.cwd(), output.absolute() / "stage2.yaml")


def _later_steps(project: Path, changes: Sequence[str]) -> Iterator[Step]:
    """Yield the steps of a project's README, and boxes on a held-out picture."""
    sets = tuple(f"--set={change}" for change in changes)
    for line, product in NEXT_STEPS:
        words = tuple(line.split())
        changed = sets if words[0] in ("doctor", "run") else ()
        yield Step((*words, *changed), project, project / product if product else None)
    picture = _held_out_picture(project / HELD_OUT)
    if picture is not None:
        yield Step(("infer", TRAINED, picture, "--output", _BOXES), project, project / _BOXES)


def _held_out_picture(records: Path) -> str | None:
    """Return the path of the first held-out picture from the project's folder; None if all are inside their records."""
    with records.open(encoding="utf-8") as lines:
        for line in lines:
            for image in json.loads(line)["images"]:
                if not image.startswith("data:"):
                    return os.path.relpath(records.parent / image, records.parent.parent)
    return None
