"""Files of data sets, opened by one rule: what data names is a regular file, what a person names may be a pipe.

A path that stands in a data set may lead to a FIFO, which is waited for, or to a device, which may have no end. A
person may name a pipe (`<(jq … x.json)`), of which so much is read and no more.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LARGEST_FOUND = 256 << 20
"""Bytes of a text file that data names: a list of images, the labels of one."""
LARGEST_PIPED = 2 << 30
"""Bytes of a pipe that a person names; a file has a size that can be looked at before."""


def require_regular(path: Path) -> None:
    """Raise OSError where a path leads to no regular file (a folder, a FIFO, a device), or to nothing."""
    if not stat.S_ISREG(_mode(path)):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes. Raises OSError."""
    require_regular(path)
    return path.open("rb")


def read_regular(path: Path, most: int = LARGEST_FOUND) -> bytes:
    """Return the bytes of a regular file. Raises OSError, of one with more than `most` too."""
    with open_regular(path) as file:
        return _read(file, path, most)


def read_named(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of what a person has named: a regular file, or a pipe without a name of its own.

    most: None = a file as a whole, a pipe up to LARGEST_PIPED. Raises OSError, of more than `most` bytes too.
    """
    mode = _mode(path)
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "It is a device", str(path))
    if stat.S_ISFIFO(mode) and os.path.exists(os.path.realpath(path)):  # the pipe of <(...) lies in no folder
        raise OSError(errno.EINVAL, "It is a FIFO, which may have no writer", str(path))
    with path.open("rb") as file:
        if most is None and stat.S_ISREG(mode):
            return file.read()
        return _read(file, path, LARGEST_PIPED if most is None else most)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder, or below, and is no folder; folders that are links count, those around them do not."""
    above: dict[str, frozenset[str]] = {str(folder): frozenset({os.path.realpath(folder)})}
    for parent, folders, names in os.walk(folder, followlinks=True):
        around = above.pop(parent)
        below = {name: os.path.realpath(os.path.join(parent, name)) for name in folders}
        folders[:] = [name for name in folders if below[name] not in around]
        above |= {os.path.join(parent, name): around | {below[name]} for name in folders}
        yield from (Path(parent, name) for name in names)


def irregular_file(folder: Path) -> Path | None:
    """Return a file in a folder, or below, that is no regular one; None where all are."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if os.path.exists(path) and not os.path.isfile(path):
                return path
    return None


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except ValueError as error:  # a zero character, which no path has
        raise OSError(errno.EINVAL, "No file can have this name", str(path)) from error


def _read(file: BinaryIO, path: Path, most: int) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"It is larger than {most} bytes", str(path))
    return content
