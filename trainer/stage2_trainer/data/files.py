"""Safe files: reading what data or a person names, and checking the places that a person names for output.

A path in a data set must lead to a regular file: a FIFO would block, and a device may have no end. A person may name a
pipe (`<(jq … x.json)`), which is read up to a limit. Output places are checked before long work begins; a check leaves
nothing behind.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from stage2_api.errors import refused

STANDARD_INPUT = Path("-")
ROOTS_VARIABLE = "ROOT_IMAGE_DIR"  # folders of images that a person names, as in PATH
LARGEST_FOUND = 256 << 20  # bytes of a text file that data names: a list of images, the labels of one image
LARGEST_PIPED = 2 << 30  # bytes of a pipe that a person names; the size of a file can be checked first
WAY_OUT = "name another place"
FOR_GOOD = frozenset({
    errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS,
})  # fmt: skip
"""Permanent errors of an output place; after any other a retry may succeed."""
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes. Raises OSError for anything else: a folder, a FIFO, a device."""
    if not stat.S_ISREG(_mode(path)):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.open("rb")


def read_regular(path: Path, most: int = LARGEST_FOUND) -> bytes:
    """Return the bytes of a regular file. Raises OSError, also for more than `most` bytes."""
    with open_regular(path) as file:
        return _read(file, path, most)


def read_named(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of a file that a person names: a regular one, an unnamed pipe, or `-`, standard input.

    most: None is a whole file, and LARGEST_PIPED of a pipe. Raises OSError, also for more than `most` bytes.
    """
    path = Path("/dev/stdin") if path == STANDARD_INPUT else path
    mode = _mode(path)
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "It is a device", str(path))
    if stat.S_ISFIFO(mode) and os.path.exists(os.path.realpath(path)):  # the pipe of <(...) is in no folder
        raise OSError(errno.EINVAL, "It is a FIFO, which may have no writer", str(path))
    with path.open("rb") as file:
        if most is None and stat.S_ISREG(mode):
            return file.read()
        return _read(file, path, LARGEST_PIPED if most is None else most)


def leads_inside(path: str | Path, folders: Iterable[str | Path]) -> bool:
    """Whether a path, with its links resolved, lies in one of the folders, or in one of `ROOT_IMAGE_DIR`."""
    named = [one for one in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if one]
    try:
        place = Path(os.path.realpath(path))
    except ValueError:  # a NUL character
        return False
    return any(place.is_relative_to(_resolved(str(one))) for one in (*folders, *named))


@functools.lru_cache(maxsize=64)
def _resolved(folder: str) -> str:
    return os.path.realpath(folder)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below. Links to folders are followed, but not to a folder that contains them."""
    above: dict[str, frozenset[str]] = {str(folder): frozenset({os.path.realpath(folder)})}
    for parent, folders, names in os.walk(folder, followlinks=True):
        around = above.pop(parent)
        below = {name: os.path.realpath(os.path.join(parent, name)) for name in folders}
        folders[:] = [name for name in folders if below[name] not in around]
        above |= {os.path.join(parent, name): around | {below[name]} for name in folders}
        yield from (Path(parent, name) for name in names)


def name_below(path: Path, root: Path) -> str:
    """Return the name of a file by which a person finds it: its path in the data set, or its whole path."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def irregular_file(folder: Path) -> Path | None:
    """Return a file in a folder or below that is not regular; None if all are."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if os.path.exists(path) and not os.path.isfile(path):
                return path
    return None


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except ValueError as error:  # a NUL character, which no path may have
        raise OSError(errno.EINVAL, "No file can have this name", str(path)) from error


def _read(file: BinaryIO, path: Path, most: int) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"It is larger than {most} bytes", str(path))
    return content


def aside_of(path: Path) -> Path:
    """Return where a file or folder is written before it is renamed."""
    return path.with_name(f".{path.name}.unfinished")


def check_place(option: str, path: Path) -> None:
    """Raise ConfigError that names the option if a file or folder cannot be created at this path.

    Missing parent folders will be created, so the nearest existing one is tried.
    """
    if path.name in ("", os.pardir):  # new/.., where `new` does not exist yet
        raise refused(option, str(path), "must end with a name", WAY_OUT)
    absolute = path.absolute()
    try:
        with suppress(FileNotFoundError):
            os.lstat(aside_of(absolute))  # a name may be too long, or pass through a file
        existing = next(folder for folder in absolute.parents if os.path.lexists(folder))
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        rule = f"must be in a folder that can be written to ({error.strerror})"
        raise refused(option, str(path), rule, WAY_OUT) from error


def check_file(option: str, path: Path) -> None:
    """Raise ConfigError if a file cannot be written. An existing file, or a device, is written to as it is."""
    if os.path.isdir(path):
        raise refused(option, str(path), "must be a file, and is a folder", WAY_OUT)
    if os.path.exists(path) and not os.access(path, os.W_OK):
        rule = f"must be a file that can be written ({os.strerror(errno.EACCES)})"
        raise refused(option, str(path), rule, WAY_OUT)
    if not os.path.exists(path):
        check_place(option, path)


def check_new_file(option: str, path: Path) -> None:
    """Raise ConfigError if something is at this path already, or a file cannot be created there."""
    if os.path.lexists(path):
        raise refused(option, str(path), "must be a new file", "remove it, or name another one")
    check_place(option, path)


def check_folder(option: str, path: Path) -> None:
    """Raise ConfigError if a folder cannot be created, or an existing one is not empty or cannot be replaced."""
    if os.path.lexists(path) and (os.path.islink(path) or not _is_empty(path)):
        rule = "must be a new or an empty folder"
        raise refused(option, str(path), rule, "name another one: nothing is overwritten")
    if os.path.isdir(path) and (os.path.samefile(path, os.curdir) or os.path.ismount(path)):
        rule = "is replaced by a new folder, so it must not be the one that this command runs in, nor a mount point"
        raise refused(option, str(path), rule, "name a new folder within it")
    check_place(option, path)


def _is_empty(path: Path) -> bool:
    """Whether a path leads to a readable, empty folder."""
    try:
        return not os.listdir(path)
    except OSError:
        return False


@contextmanager
def _full_disk_named(option: str, path: Path) -> Iterator[None]:
    """Raise ConfigError that names the option where the block fills the disk. What Rust raises has its words alone."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) not in FULL_DISK and os.strerror(errno.ENOSPC) not in str(error):
            raise
        rule, way_out = "must be where all of it fits, and the disk is full", "free some space, or name another place"
        raise refused(option, str(path), rule, way_out) from error


@contextmanager
def new_file(option: str, path: Path) -> Iterator[Path]:
    """Yield a temporary path for a new file, which is renamed at the end, and removed after an error.

    Raises ConfigError that names the option if something is at the path already, or a file cannot be created there.
    """
    check_new_file(option, path)
    aside = aside_of(path)
    with _full_disk_named(option, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            check_new_file(option, path)  # another process may have created it
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def new_folder(option: str, path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed at the end, and removed after an error.

    Raises ConfigError that names the option if a folder cannot be created at the path, or it holds something.
    """
    check_folder(option, path)
    aside = aside_of(path)
    shutil.rmtree(aside, ignore_errors=True)  # left by a command that was killed
    with _full_disk_named(option, path):
        aside.mkdir(parents=True)
        try:
            yield aside
            for file in filter(Path.is_file, aside.iterdir()):
                file.chmod(0o644)  # safetensors writes 0600; a container runs as another user
            check_folder(option, path)  # another process may have filled it
            if path.exists():
                path.rmdir()
            aside.rename(path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def relative_path(file: Path, folder: Path) -> str:
    """Return a relative path that leads from a folder to a file.

    The `..` of a folder that is a link is the parent of the link's target, not the folder that contains the link. So
    the path by names is used where it is correct, and else the path between both resolved places.
    """
    named = os.path.relpath(file.absolute(), folder.absolute())
    if os.path.realpath(folder / named) == os.path.realpath(file):
        return named
    return os.path.relpath(Path(os.path.realpath(file.parent), file.name), os.path.realpath(folder))
