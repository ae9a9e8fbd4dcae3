"""Commands of stage2 as steps of another command: printed as a person writes them, and run to their end.

The first is the import of annotations, for each command that takes a data file.
"""

from __future__ import annotations

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

from stage2_api.errors import refused
from stage2_trainer.prepare.formats import data_file, import_words
from stage2_trainer.prepare.project_request import ProjectRequest

STDERR = 2  # the file descriptor
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
    named = () if units is None else ("--units", units)
    step = Step(("import", *words, *named, "--output", str(records)), Path.cwd(), records.absolute())
    return step, replace(request, data=records, images=request.images or (folder,))


class ImportFailed(Exception):
    """An import within another command failed, and has printed why. code: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the import ended with exit code {code}")
        self.code = code


@contextmanager
def imported(path: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the data file of annotations, which is gone after the block, and the folder of their images.

    A data file is yielded itself. Raises ConfigError, and ImportFailed.
    """
    words = import_words(path) if os.path.isdir(path) or os.path.isfile(path) else None
    if words is None:
        yield data_file(path), ()
        return
    with TemporaryDirectory() as folder:
        records = Path(folder, f"{path.resolve().stem}.jsonl")
        step = Step(("import", *words, "--output", str(records)), Path.cwd())
        if code := run_step(step, output=STDERR):
            raise ImportFailed(code)
        yield records, (str(path if os.path.isdir(path) else path.parent),)


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
    return process.returncode if process.returncode >= 0 else _SIGNALLED - process.returncode
