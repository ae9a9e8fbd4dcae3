"""Images that several records of a data file have: the same file, or files of the same bytes."""

from __future__ import annotations

import filecmp
import json
import os
import zlib
from pathlib import Path

from stage2_trainer.data.images import file_path
from stage2_trainer.data.records import Line
from stage2_trainer.data.regular_files import open_regular

HEAD_BYTES = 4096


class SameImages:
    """Tells which images were met before. Of each it keeps two numbers, and compares whole files where these agree."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first: dict[int, int] = {}

    def met(self, source: str, line: Line) -> bool:
        """Whether an earlier line of the file has this image, which is there."""
        try:
            offset = self._first.setdefault(_key(source), line.offset)
            return offset != line.offset and any(_same(source, other) for other in self._images(offset))
        except OSError:
            return False  # it went away, or cannot be read: others say so

    def _images(self, offset: int) -> list[str]:
        """Return the images of the line that begins there, which was read before."""
        with self._path.open("rb") as file:
            file.seek(offset)
            images = json.loads(file.readline())["images"]
        folder = self._path.parent
        return [one if one.startswith("data:") else str((folder / one).resolve()) for one in images]


def _key(source: str) -> int:
    """Return a number that images of the same bytes share, and few others."""
    if source.startswith("data:"):
        return hash(source)
    path = file_path(source)
    with open_regular(path) as file:
        return hash((os.fstat(file.fileno()).st_size, zlib.crc32(file.read(HEAD_BYTES))))


def _same(source: str, other: str) -> bool:
    if source == other:
        return True
    if source.startswith("data:") or other.startswith("data:"):
        return False
    return filecmp.cmp(file_path(source), file_path(other), shallow=False)
