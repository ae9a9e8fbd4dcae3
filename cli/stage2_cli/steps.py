"""Commands of stage2 as steps of another command: printed as a person writes them, and run to their end.

The first is the import of annotations, for each command that takes a data file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from stage2_api.errors import ConfigError, Problem, refused
from stage2_report.terminal import Terminal
from stage2_trainer.data.files import files_below, name_below, open_regular
from stage2_trainer.prepare.annotations import IMAGE_ENDINGS
from stage2_trainer.prepare.formats import data_file, import_words
from stage2_trainer.prepare.project_request import ProjectRequest

STDERR = 2  # the file descriptor
SIGNALLED = 128  # a shell's exit code for a process that a signal ended, without the signal's number


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


def note_of(output: Path) -> Path:
    """Return the file that says what a project was made from. It lies beside it, and is written before it."""
    return output.with_name(f"{output.name}.made-from.json")


def with_records(request: ProjectRequest, units: str | None = None) -> tuple[Step | None, ProjectRequest]:
    """Return the import step of a request's annotations, and the same request for the data file that it writes.

    A request for a data file needs no step, and comes back with the path of the file.

    Raises ConfigError for data that no import reads.
    """
    records = request.output.with_name(f"{request.output.name}.jsonl")
    own = (records.name, note_of(request.output).name)
    words = import_words(request.data, request.images, own)
    if words is None:
        if units is not None:
            rule = f"is of annotations that are imported, and {request.data} is a data file, whose records name theirs"
            raise refused("--units", units, rule, "leave it out")
        return None, replace(request, data=data_file(request.data, own))
    folder = request.data if request.data.is_dir() else request.data.parent
    step = Step(("import", *words, *_named(units), "--output", str(records)), Path.cwd(), records.absolute())
    return step, replace(request, data=records, images=request.images or (folder,))


def _named(units: str | None) -> tuple[str, ...]:
    return () if units is None else ("--units", units)


def check_same(request: ProjectRequest, units: str | None, records: Path | None) -> None:
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


class ImportFailed(Exception):
    """An import within another command failed, and has printed why. code: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the import ended with exit code {code}")
        self.code = code


@contextmanager
def imported(path: Path, units: str | None = None) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the data file of annotations, which is gone after the block, and the folder of their images.

    A data file is yielded itself. units: of the annotations. Raises ConfigError, and ImportFailed.
    """
    words = import_words(path) if os.path.isdir(path) or os.path.isfile(path) else None
    if words is None:
        yield data_file(path), ()
        return
    with TemporaryDirectory() as folder:
        records = Path(folder, f"{path.resolve().stem}.jsonl")
        step = Step(("import", *words, *_named(units), "--output", str(records)), Path.cwd())
        if code := run_step(step, output=STDERR):
            raise ImportFailed(code)
        yield records, (str(path if os.path.isdir(path) else path.parent),)


def run_undone(step: Step) -> int:
    """Print a step and run it to its end, unless its product is there; return its exit code."""
    console = Terminal()
    if step.product is not None and step.product.exists():
        console.print(f"done before: {step.line}")
        return os.EX_OK
    console.print(f"$ {step.line}", style="bold")
    return run_step(step)


def run_step(step: Step, output: int | None = None) -> int:
    """Run a step to its end; return its exit code. It gets the terminal's Ctrl-C itself, and saves what it has.

    output: the file descriptor that it prints to, if not this process's standard output.
    """
    command = [sys.executable, "-m", "stage2_cli", *step.words]
    with subprocess.Popen(command, cwd=step.folder, stdout=output) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while process.returncode is None:
            with suppress(KeyboardInterrupt):
                process.wait()
        signal.signal(signal.SIGTERM, before)
    return process.returncode if process.returncode >= 0 else SIGNALLED - process.returncode
