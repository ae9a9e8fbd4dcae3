"""The lines of a file that another process writes, each once, in memory that does not grow with the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PIECE = 1 << 16
LONGEST = 16_000_000
"""Bytes of a line; of a longer one nothing is kept."""


class LogTail:
    """A place in a growing file. A last line without its end is left for the next time.

    offset: bytes that are passed over. times_begun: how often the file was begun, by others who put a new one in its
    place or cut it.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = path
        self.times_begun = 0
        self._offset = offset
        self._file_id: tuple[int, int] | None = None
        self._rest = bytearray()
        self._too_long = False

    def new_lines(self) -> Iterator[bytes]:
        """Yield the whole lines that have come since the last time, without their ends; none where no file is."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            self._look(os.fstat(file.fileno()))
            file.seek(self._offset)
            while piece := file.read(PIECE):
                self._offset += len(piece)
                yield from self._lines(piece)

    def _look(self, found: os.stat_result) -> None:
        """Begin anew where this is another file than the last time, or a shorter one."""
        file_id = (found.st_dev, found.st_ino)
        if self._file_id not in (None, file_id) or found.st_size < self._offset:
            self._offset, self._too_long = 0, False
            self._rest.clear()
            self.times_begun += 1
        self._file_id = file_id

    def _lines(self, piece: bytes) -> Iterator[bytes]:
        *ended, rest = piece.split(b"\n")
        for line in ended:
            self._keep(line)
            if not self._too_long:
                yield bytes(self._rest)
            self._rest.clear()
            self._too_long = False
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        if self._too_long or len(self._rest) + len(part) > LONGEST:
            self._too_long = True
            self._rest.clear()
        else:
            self._rest += part
