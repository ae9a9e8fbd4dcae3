"""`stage2 train`: from annotations to a model of stage 2, by the commands that a person would write.

Each step is a command of its own, printed before it runs. What a step has written stays, so the same line resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from stage2_api.errors import ConfigError, Problem, refused
from stage2_cli.steps import Step, note_of, run_step, with_records
from stage2_report.terminal import Terminal
from stage2_trainer.data.files import files_below, name_below, open_regular
from stage2_trainer.prepare.annotations import IMAGE_ENDINGS
from stage2_trainer.prepare.project_request import HELD_OUT, NEXT_STEPS, PAGE, TRAINED, ProjectRequest

_BOXES = "runs/boxes"


def train(request: ProjectRequest, changes: Sequence[str] = (), units: str | None = None) -> int:
    """Run all steps; return 0, or the exit code of the one that failed. Raises ConfigError.

    request: of the project; its `data` may also be annotations that `stage2 import` reads. changes: of `--set`, for
    the runs of both stages. units: of the annotations' coordinates.
    """
    console, began = Terminal(), time.monotonic()
    project, here = request.output.absolute(), Path.cwd()
    for step in chain(_first_steps(request, units), _later_steps(project, changes)):
        if step.folder != here:
            console.print(f"$ cd {shlex.quote(os.path.relpath(step.folder, here))}", style="bold")
            here = step.folder
        if step.product is not None and step.product.exists():
            console.print(f"done before: {step.line}")
            continue
        console.print(f"$ {step.line}", style="bold")
        if code := run_step(step):
            way_out = "correct what it reports; the same `stage2 train` then goes on from here"
            Terminal(stderr=True).print(f"exit code {code} of: {step.line}; {way_out}")
            return code
    console.print(f"all steps took {time.monotonic() - began:,.0f} s; the model is {project / TRAINED}")
    console.print(f"boxes on a held-out picture: {project / _BOXES}")
    console.print(f"page: {project / PAGE}")
    return os.EX_OK


def _first_steps(request: ProjectRequest, units: str | None) -> Iterator[Step]:
    """Yield the steps that create the project. Raises ConfigError for data that no import reads, or another project."""
    step, records = with_records(request, units)
    output = request.output
    _check_same(request, units, records.data if step is not None else None)
    if step is not None:
        yield step
    options = [("--data", records.data), ("--val-data", request.held_out)]
    options += [("--images", one) for one in records.images]
    given = (word for option, value in options if value is not None for word in (option, str(value)))
    model = ("--model", request.model, "--gpus", str(request.gpus), "--output", str(output))
    yield Step(("init", *given, *model), Path.cwd(), output.absolute() / "stage2.yaml")


def _check_same(request: ProjectRequest, units: str | None, records: Path | None) -> None:
    """Raise ConfigError if a product of an earlier call was made from something else; note what this one is made from.

    records: what the import writes.
    """
    output = request.output
    note, project = note_of(output), output / "stage2.yaml"
    of_records = {"--data": _digest(request.data, output), "--units": units}
    of_project = of_records | {
        "--val-data": request.held_out and _digest(request.held_out, output),
        "--images": sorted(str(one.resolve()) for one in request.images),
        "--model": request.model,
        "--gpus": request.gpus,
    }
    shown = of_project | {"--data": str(request.data), "--val-data": request.held_out and str(request.held_out)}
    for product, made_from in ((project, of_project), (records, of_records)):
        if product is None or not product.exists():
            continue
        noted = _noted(note)
        changed = [option for option, value in made_from.items() if noted.get(option, ...) != value]
        old = ", ".join(str(path) for path in (output, records, note) if path is not None and path.exists())
        way_out = f"name another --output, or remove {old}"
        if not noted:
            rule = f"has {product.name} already, and no {note.name} that says what it was made from"
            raise refused("--output", str(output), rule, way_out)
        if changed:
            rule = f"is not what {product} was made from"
            raise ConfigError([Problem(option, shown[option], rule, way_out) for option in changed])
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(of_project, indent=1) + "\n", encoding="utf-8")


def _noted(note: Path) -> dict[str, object]:
    """Return what a project was made from; empty where nothing says so."""
    try:
        noted = json.loads(note.read_bytes())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _digest(data: Path, output: Path) -> str:
    """Return a digest of a file, or of a folder: of the names and sizes of images, and the content of all else.

    What training has written into the folder does not count.
    """
    digest = hashlib.sha256()
    own = str(output.absolute())
    for file in [data] if data.is_file() else sorted(files_below(data)):
        if not file.is_file() or str(file.absolute()).startswith(own):
            continue
        size = file.stat().st_size
        digest.update(f"{name_below(file, data)}\0{size}\0".encode(errors="surrogateescape"))
        if file.suffix.lower() not in IMAGE_ENDINGS:
            with open_regular(file) as content:
                while part := content.read(1 << 20):
                    digest.update(part)
    return digest.hexdigest()


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
