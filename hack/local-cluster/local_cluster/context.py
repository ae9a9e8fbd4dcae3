"""What images are built from: the files that .dockerignore admits, pyproject.toml cut to what an image installs."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]

IMAGE_TABLES = ("build-system", "project", "tool.hatch", "tool.uv")


@contextmanager
def scratch(cache: Path, name: str) -> Iterator[Path]:
    """An empty folder in the cache, removed afterwards; what a killed command has left of it is removed before."""
    folder = cache / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def staged(cache: Path) -> Iterator[Path]:
    """A copy of the build context, removed afterwards."""
    with scratch(cache, "context") as context:
        for name in admitted((REPOSITORY / ".dockerignore").read_text()):
            source, target = REPOSITORY / name, context / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
        project = context / "pyproject.toml"
        project.write_text(without_developer_tables(project.read_text()))
        yield context


def admitted(dockerignore: str) -> list[str]:
    """The paths that an ignore file of the form `*`, `!path`, … lets in."""
    return [line.removeprefix("!") for line in dockerignore.splitlines() if line.startswith("!")]


def without_developer_tables(pyproject: str) -> str:
    """pyproject.toml as images install it: a change of linters or of dependency groups changes nothing."""
    tables = re.split(r"^(?=\[)", pyproject, flags=re.MULTILINE)
    return "".join(table for table in tables if table.lstrip("[").startswith(IMAGE_TABLES))
