"""Make each defect of tests/mutants.yaml in a copy of the code and see a test fail.

`python -m tests.mutants [WORD ...]`: words choose the defects whose name has one of them. The copy goes before the
installed code on Python's path, and only what a defect names is run. The exit status is 1 where one is not noticed,
or where its tests fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".yaml")
SOURCES = ("crds", "controller", "trainer", "report", "cli")
COPIED = (*SOURCES, "tests", "hack", "docs", "examples", "bench", "charts", "images", "pyproject.toml", "README.md")
FAILED, PASSED = 1, 0  # what pytest ends with; anything else is no verdict


@dataclass(frozen=True)
class Mutant:
    """A defect: `put` in the place of `find`, which occurs once in the file; `tests` are what must notice."""

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
        path.write_text(text.replace(self.find, self.put), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Take it out again."""
        shutil.copyfile(ROOT / self.file, folder / self.file)


def mutants(words: Sequence[str] = ()) -> list[Mutant]:
    """Return the defects of the list whose name has one of the words; all without words."""
    listed = [Mutant(**entry) for entry in yaml.safe_load(LIST.read_text(encoding="utf-8"))]
    return [mutant for mutant in listed if not words or any(word in mutant.name for word in words)]


def copy_of_the_code(folder: Path) -> None:
    """Copy what tests read, and none of what was built."""
    for name in COPIED:
        source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", ".venv", "out")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copyfile(source, folder / name)


def verdict(folder: Path, tests: str) -> int:
    """Run tests in the copy until one fails; return pytest's exit status."""
    path = os.pathsep.join(str(folder / name) for name in SOURCES)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


def survivors(chosen: Sequence[Mutant], folder: Path) -> list[str]:
    """Return what is wrong with each defect that no test notices, or whose tests fail without it."""
    wrong = [f"{tests} fails without any" for tests in sorted({m.tests for m in chosen}) if verdict(folder, tests)]
    for number, mutant in enumerate(chosen, 1):
        mutant.change(folder)
        found = verdict(folder, mutant.tests)
        mutant.restore(folder)
        print(f"{number}/{len(chosen)} {'noticed' if found == FAILED else 'NOT NOTICED'}: {mutant.name}", flush=True)
        if found != FAILED:
            wrong.append(f"{mutant.name}: pytest ended with {found}")
    return wrong


def main() -> int:
    """Judge the chosen defects."""
    chosen = mutants(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        copy_of_the_code(Path(name))
        wrong = survivors(chosen, Path(name))
    print("\n".join(wrong) or f"all {len(chosen)} are noticed")
    return FAILED if wrong or not chosen else PASSED


if __name__ == "__main__":
    sys.exit(main())
