"""`stage2 train`: from annotations to a model of stage 2, by the commands that a person would write.

Each step is a command of its own, printed before it runs. What a step has written stays, so the same line resumes.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from stage2_report.terminal import Terminal
from stage2_trainer.prepare.formats import data_file, import_words
from stage2_trainer.prepare.project_request import HELD_OUT, NEXT_STEPS, PAGE, TRAINED, ProjectRequest

_BOXES = "runs/boxes"
_SIGNALLED = 128  # a shell's exit code for a process that a signal ended, without the signal's number


@dataclass(frozen=True)
class Step:
    """A command. folder: where it runs. product: what is there once the step is done; None: it is never done."""

    words: tuple[str, ...]
    folder: Path
    product: Path | None = None

    @property
    def line(self) -> str:
        """The command as a person writes it."""
        return shlex.join(["stage2", *self.words])


def train(request: ProjectRequest, changes: Sequence[str] = ()) -> int:
    """Run all steps; return 0, or the exit code of the one that failed. Raises ConfigError.

    request: of the project; its `data` may also be annotations that `stage2 import` reads. changes: of `--set`, for
    the runs of both stages.
    """
    console, began = Terminal(), time.monotonic()
    project, here = request.output.absolute(), Path.cwd()
    for step in chain(_first_steps(request), _later_steps(project, changes)):
        if step.folder != here:
            console.print(f"$ cd {shlex.quote(os.path.relpath(step.folder, here))}", style="bold")
            here = step.folder
        if step.product is not None and step.product.exists():
            console.print(f"done before: {step.line}")
            continue
        console.print(f"$ {step.line}", style="bold")
        if code := _run(step):
            way_out = "correct what it reports; the same `stage2 train` then goes on from here"
            Terminal(stderr=True).print(f"exit code {code} of: {step.line}; {way_out}")
            return code
    console.print(f"all steps took {time.monotonic() - began:,.0f} s; the model is {project / TRAINED}")
    console.print(f"boxes on a held-out picture: {project / _BOXES}")
    console.print(f"page: {project / PAGE}")
    return os.EX_OK


def _first_steps(request: ProjectRequest) -> Iterator[Step]:
    """Yield the steps that create the project. Raises ConfigError for data that no import reads."""
    here, output = Path.cwd(), request.output
    data, images = data_file(request.data), request.images
    if words := import_words(request.data, images):
        data = output.with_name(f"{output.name}.jsonl")
        yield Step(("import", *words, "--output", str(data)), here, data.absolute())
        images = images or (request.data if request.data.is_dir() else request.data.parent,)
    options = [("--data", data), ("--val-data", request.held_out), *(("--images", one) for one in images)]
    given = (word for option, value in options if value is not None for word in (option, str(value)))
    model = ("--model", request.model, "--gpus", str(request.gpus), "--output", str(output))
    yield Step(("init", *given, *model), here, output.absolute() / "stage2.yaml")


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


def _run(step: Step) -> int:
    """Run a step to its end; return its exit code. It gets the terminal's Ctrl-C itself, and saves what it has."""
    command = [sys.executable, "-m", "stage2_cli", *step.words]
    with subprocess.Popen(command, cwd=step.folder) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while process.returncode is None:
            with suppress(KeyboardInterrupt):
                process.wait()
        signal.signal(signal.SIGTERM, before)
    return process.returncode if process.returncode >= 0 else _SIGNALLED - process.returncode
