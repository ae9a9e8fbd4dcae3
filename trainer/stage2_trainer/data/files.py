"""Files of data sets, opened by one rule: what data names is a regular file, what a person names may be a pipe.

A path that stands in a data set may lead to a FIFO, which is waited for, or to a device, which may have no end. A
person may name a pipe (`<(jq … x.json)`), of which so much is read and no more.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from stage2_api.errors import ConfigError, Problem

WAY_OUT = "name another place"
FOR_GOOD = frozenset(
    {
        errno.EACCES,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Errors of a place that no time mends; of others the next try may be free."""


def aside_of(path: Path) -> Path:
    """Return where a file or folder is written before it gets its name."""
    return path.with_name(f".{path.name}.unfinished")


def check_place(option: str, path: Path) -> None:
    """Raise ConfigError that names the option where a file or folder cannot be made at this path.

    Folders above it that are not there will be made, so the nearest one that is there counts.
    """
    if path.name in ("", os.pardir):  # new/.., where `new` is not there yet
        rule = "must end with the name that it is to have"
        raise ConfigError([Problem(option, str(path), rule, WAY_OUT)])
    whole = path.absolute()
    try:
        with suppress(FileNotFoundError):
            os.lstat(aside_of(whole))  # a name may be too long, or pass through a file
        there = next(folder for folder in whole.parents if os.path.lexists(folder))
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        rule = f"must be in a folder that can be written to ({error.strerror})"
        raise ConfigError([Problem(option, str(path), rule, WAY_OUT)]) from error


def check_file(option: str, path: Path) -> None:
    """Raise ConfigError where a file cannot be written. One that is there, or a device, is written to as it is."""
    if os.path.isdir(path):
        raise ConfigError([Problem(option, str(path), "must be a file, and is a folder", WAY_OUT)])
    if os.path.exists(path) and not os.access(path, os.W_OK):
        rule = f"must be a file that can be written ({os.strerror(errno.EACCES)})"
        raise ConfigError([Problem(option, str(path), rule, WAY_OUT)])
    if not os.path.exists(path):
        check_place(option, path)


def check_new_file(option: str, path: Path) -> None:
    """Raise ConfigError where something is at this path already, or a file cannot be made there."""
    if os.path.lexists(path):
        raise ConfigError([Problem(option, str(path), "must be a new file", "remove it, or name another one")])
    check_place(option, path)


def check_folder(option: str, path: Path) -> None:
    """Raise ConfigError where a new folder cannot be made, or one that is there is not empty or cannot be replaced."""
    if os.path.lexists(path) and (os.path.islink(path) or not _is_empty(path)):
        rule = "must be a new or an empty folder"
        raise ConfigError([Problem(option, str(path), rule, "name another one: nothing is overwritten")])
    if os.path.isdir(path) and (os.path.samefile(path, os.curdir) or os.path.ismount(path)):
        rule = "is replaced by a new folder, so it must not be the one that this command runs in, nor a mount point"
        raise ConfigError([Problem(option, str(path), rule, "name a new folder within it")])
    check_place(option, path)


def _is_empty(path: Path) -> bool:
    """Whether a path leads to a folder that can be read, without anything in it."""
    try:
        return not os.listdir(path)
    except OSError:
        return False


def relative_path(file: Path, folder: Path) -> str:
    """Return a path that leads from a folder to a file.

    The `..` of a folder that is a link is not the folder that the link lies in, but the one above what it leads to. So
    the path of names is taken where it leads there, and else the one between what both are without links.
    """
    named = os.path.relpath(file.absolute(), folder.absolute())
    real = os.path.realpath(file)
    if os.path.realpath(folder / named) == real:
        return named
    return os.path.relpath(Path(os.path.realpath(file.parent), file.name), os.path.realpath(folder))


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
