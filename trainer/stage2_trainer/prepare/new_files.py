"""The files of an import: written aside, and named when all of them are whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stage2_trainer.data.files import aside_of, check_new_file


class NewFiles:
    """A data file that is being written, and beside it the folder of images that had no files."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._folder = images_folder(output)
        self._aside = aside_of(self._folder)
        self.lines = aside_of(output)

    def image(self, name: str, content: bytes) -> Path:
        """Write an image, and return the path that it will have."""
        self._aside.mkdir(exist_ok=True)
        (self._aside / name).write_bytes(content)
        return self._folder / name

    def finish(self) -> None:
        """Give all of them their names, the data file last. Raises ConfigError where one was made meanwhile."""
        check_new(self._output)
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
    output.parent.mkdir(parents=True, exist_ok=True)
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
    """Raise ConfigError where a data file, or its folder of images, is there already, or cannot be made."""
    check_new_file("--output", output)
    check_new_file("--output", images_folder(output))
