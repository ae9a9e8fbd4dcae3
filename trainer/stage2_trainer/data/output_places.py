"""Places that a person names for what is written, looked at before anything else: long work is not to end at them.

A check leaves nothing behind: folders are made when something is written into them.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

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
