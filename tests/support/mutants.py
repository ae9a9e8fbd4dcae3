"""Make each defect of tests/mutants.yaml in a copy of the code and see a test fail.

    python -m tests.support.mutants [--jobs N] [--sample N] [WORD ...]

Words choose the defects whose name has one of them. A sample has so many of them, others each day. Only the tests that
a defect names are run, each time in a copy of this process, which has imported what they need. The exit status is 1
where a defect is not noticed, or where its tests fail without it; those of a sample are thought to pass without it, as
`make test-unit` shows.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests/mutants.yaml"
SOURCES = ("crds", "controller", "trainer", "report", "cli")
COPIED = (*SOURCES, "tests", "hack", "docs", "examples", "bench", "charts", "images", "pyproject.toml", "README.md")
IMPORTED = ("torch", "transformers.models.auto", "peft", "scipy.optimize", "aiohttp.web", "pydantic", "hypothesis")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
OURS = ("stage2_", "tests")
ASIDE = ".sound"  # the file as it was, beside the copy: in it, helm would take it for a template
FAILED, PASSED = 1, 0  # what pytest ends with; anything else is no verdict
LIMIT_S = 600.0  # a defect may make a test wait for ever
LOOK_S = 0.02


@dataclass(frozen=True)
class Mutant:
    """A defect: `put` in the place of `find`, which occurs once in the file.

    tests: what must notice, files or single tests with spaces between them.
    """

    name: str
    file: str
    find: str
    put: str
    tests: str

    def change(self, folder: Path) -> None:
        """Make it in a copy of the code. Raises ValueError where the code no longer has what it replaces."""
        path = folder / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self.file} has {self.find!r} {count} times, and must have it once: {self.name}")
        shutil.copy2(path, f"{folder}{ASIDE}")  # with its time, by which Python knows what it has compiled
        path.write_text(text.replace(self.find, self.put), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Take it out again."""
        os.replace(f"{folder}{ASIDE}", folder / self.file)


@dataclass(frozen=True)
class Trial:
    """A run of tests, with a defect or without any."""

    tests: tuple[str, ...]
    mutant: Mutant | None = None

    @property
    def name(self) -> str:
        """What it shows."""
        return self.mutant.name if self.mutant else f"{' '.join(self.tests)}, without any defect"


@dataclass(frozen=True)
class Verdict:
    """How a trial ended: with pytest's exit status, or a signal's number below zero."""

    trial: Trial
    status: int
    seconds: float

    @property
    def good(self) -> bool:
        """Whether a defect was noticed, and tests without any passed."""
        return self.status == (PASSED if self.trial.mutant is None else FAILED)

    def __str__(self) -> str:
        done = "passed" if self.trial.mutant is None else "noticed"
        word = done if self.good else f"NOT {done.upper()} (pytest ended with {self.status})"
        return f"{word} in {self.seconds:.1f} s: {self.trial.name}"


def mutants(words: Sequence[str] = ()) -> list[Mutant]:
    """Return the defects of the list whose name has one of the words; all without words."""
    listed = [Mutant(**entry) for entry in yaml.safe_load(LIST.read_text(encoding="utf-8"))]
    return [mutant for mutant in listed if not words or any(word in mutant.name for word in words)]


def trials(chosen: Sequence[Mutant]) -> Iterator[Trial]:
    """Yield the tests of these defects, file by file: they must pass."""
    by_file: dict[str, set[str]] = {}
    for one in {test for mutant in chosen for test in mutant.tests.split()}:
        by_file.setdefault(one.partition("::")[0], set()).add(one)
    for file, found in sorted(by_file.items()):
        yield Trial((file,) if file in found else tuple(sorted(found)))


def judge(waiting: Iterable[Trial], jobs: int) -> Iterator[Verdict]:
    """Run so many trials at once, each in a copy of the code and in a copy of this process; yield them as they end."""
    queue = deque(waiting)
    with _copies(jobs) as free:
        running: dict[int, tuple[Trial, Path, float]] = {}
        while queue or running:
            while queue and free:
                trial, folder = queue.popleft(), free.pop()
                if trial.mutant:
                    trial.mutant.change(folder)
                running[_start(folder, trial.tests)] = trial, folder, time.monotonic()
            time.sleep(LOOK_S)
            for pid, (trial, folder, start) in list(running.items()):
                seconds = time.monotonic() - start
                if (status := _ended(pid, seconds)) is not None:
                    if trial.mutant:
                        trial.mutant.restore(folder)
                    free.append(folder)
                    del running[pid]
                    yield Verdict(trial, status, seconds)


@contextmanager
def _copies(count: int) -> Iterator[list[Path]]:
    """Yield folders with what tests read, and none of what was built."""
    ignored = shutil.ignore_patterns("__pycache__", ".venv", "out", "node_modules")
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(number)) for number in range(count)]
        for part in COPIED:
            if (source := ROOT / part).is_dir():
                shutil.copytree(source, folders[0] / part, ignore=ignored)
            else:
                shutil.copy2(source, folders[0] / part)
        for part in SOURCES:
            compileall.compile_dir(folders[0] / part, quiet=1)
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        yield list(folders)


def _start(folder: Path, tests: Sequence[str]) -> int:
    """Run tests until one fails, in a copy of this process; return its id, which is also its session's."""
    pid = os.fork()
    if pid == 0:
        _become(folder, tests)
    return pid


def _become(folder: Path, tests: Sequence[str]) -> NoReturn:
    status = -1
    try:
        os.setsid()
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        paths = [str(folder), *(str(folder / name) for name in SOURCES)]
        sys.path[:0] = paths
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True  # a defect has the file's name
        for name in [one for one in sys.modules if one.startswith(OURS)]:
            del sys.modules[name]
        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}", *tests]))
    finally:
        os._exit(status & 0xFF)


def _ended(pid: int, seconds: float) -> int | None:
    """Return how a process ended, with all that it started; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found and seconds < LIMIT_S:
        return None
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not found:
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _load() -> None:
    """Import what takes long, once for all copies. Raises RuntimeError if that starts a thread: a copy has only one."""
    os.environ |= ONE_THREAD
    for name in IMPORTED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"one of {', '.join(IMPORTED)} starts a thread, which no copy would have")


def main() -> int:
    """Judge the chosen defects."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutants", description="see tests notice defects")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--sample", type=int, help="so many of the defects, others each day")
    parser.add_argument("words", nargs="*", help="of names of defects")
    given = parser.parse_args()
    chosen, before = mutants(given.words), []
    if given.sample is not None:
        chosen = random.Random(date.today().toordinal()).sample(chosen, min(given.sample, len(chosen)))
    else:
        before = list(trials(chosen))
    _load()
    waiting = [*before, *(Trial(tuple(mutant.tests.split()), mutant) for mutant in chosen)]
    wrong = []
    for number, verdict in enumerate(judge(waiting, given.jobs), 1):
        print(f"{number}/{len(waiting)} {verdict}", flush=True)
        if not verdict.good:
            wrong.append(str(verdict))
    print("\n".join(wrong) or f"all {len(chosen)} are noticed")
    return FAILED if wrong or not chosen else PASSED


if __name__ == "__main__":
    sys.exit(main())
