"""The files of an import: written aside, and named when all of them are whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stage2_api.errors import ConfigError, Problem


class NewFiles:
    """A data file that is being written, and beside it the folder of images that had no files."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._folder = images_folder(output)
        self._aside = output.with_name(f".{self._folder.name}.unfinished")
        self.lines = output.with_name(f".{output.name}.unfinished")

    def image(self, name: str, content: bytes) -> Path:
        """Write an image, and return the path that it will have."""
        self._aside.mkdir(exist_ok=True)
        (self._aside / name).write_bytes(content)
        return self._folder / name

    def finish(self) -> None:
        """Give all of them their names, the data file last."""
        if self._aside.exists():
            self._aside.rename(self._folder)
        self.lines.rename(self._output)

    def discard(self) -> None:
        """Remove what has no name yet."""
        self.lines.unlink(missing_ok=True)
        shutil.rmtree(self._aside, ignore_errors=True)


@contextmanager
def new_files(output: Path) -> Iterator[NewFiles]:
    """Yield the files of an import; they are there when the block has ended, or none of them is."""
    check_new(output)
    check_place("--output", output)
    files = NewFiles(output)
    files.discard()  # of an import that was killed
    try:
        yield files
        files.finish()
    finally:
        files.discard()


def images_folder(output: Path) -> Path:
    """Return the folder of the images of a data file that had no files."""
    return output.with_name(f"{output.stem}-images")


def check_new(output: Path) -> None:
    """Raise ConfigError where a data file, or its folder of images, is there already."""
    for path in (output, images_folder(output)):
        if path.exists():
            raise ConfigError([Problem("--output", str(path), "must be a new file", "remove it, or name another one")])


def check_place(option: str, path: Path) -> None:
    """Raise ConfigError that names the option where a file or folder cannot be made; folders above it are."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        rule = f"must be in a folder that can be written to ({error.strerror})"
        raise ConfigError([Problem(option, str(path), rule, "name another place")]) from error
