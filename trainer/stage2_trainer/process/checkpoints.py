"""Checkpoints that are whole or not there: written aside, flushed to disk, looked over, listed, and then renamed.

A crash, a full disk or a SIGKILL at any moment leaves the checkpoints that were there, and at most a folder of
unfinished files, which the next save removes. A checkpoint of `transformers` is a dozen files of several writers; its
name is given to it when all of them are on disk, so what bears such a name is whole (as a database does it: write
ahead, fsync, rename; POSIX rename is atomic).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
"""The folder below the output folder in which a checkpoint is written."""
MANIFEST = "stage2_checkpoint.json"
PREFIX = "checkpoint-"
UNPROVED = "unproved-"
"""Before the name of a checkpoint that no start goes on from: servers may have answered with other weights."""
MARK = "stage2_proved.json"
"""The file beside checkpoints that names the newest step whose sync was proved: {"step": 12}."""
STATE = "trainer_state.json"
TORCH_FILES = frozenset({".pt", ".pth", ".bin"})
ROOM_TO_SPARE = 1.05


class CheckpointError(OSError):
    """A checkpoint could not be written; those that were there are untouched."""


def newest_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole; None where there is none. Each that is passed over is said."""
    for found in reversed(checkpoints_of(folder)):
        flaw = flaw_of(found)
        if flaw is None:
            return found
        logger.warning("%s is passed over, and an older checkpoint looked for: %s", found, flaw)
    return None


def flaw_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint; None where it is whole.

    One without a list of its files comes from elsewhere: it must have the file that `transformers` writes last.
    """
    manifest = checkpoint / MANIFEST
    try:
        if not manifest.exists():
            json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
            return _first_flaw(checkpoint)
        listed: dict[str, int] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        for name, size in listed.items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, and {size} were written"
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def ends_training(checkpoint: Path, *, max_steps: int, epochs: float) -> int | None:
    """Return the step of a checkpoint with which a training of so many steps, or else epochs, has ended; else None.

    max_steps: -1 leaves it to the epochs.
    """
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    step: int = state["global_step"]
    if max_steps > 0:
        return step if step >= max_steps else None
    return step if step >= state["max_steps"] and epochs <= state["num_train_epochs"] else None


def staging(folder: Path) -> Path:
    """Return the empty folder in which the next checkpoint is written; what an earlier run left there is removed."""
    aside = folder / UNFINISHED
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def publish(staged: Path, folder: Path) -> Path:
    """Give a staged checkpoint its name in the output folder, once all of it is on disk and can be read.

    Raises:
        CheckpointError: a file is not what it was to be.
    """
    if flaw := _first_flaw(staged):
        raise CheckpointError(f"{staged.name} was not written whole: {flaw}")
    files = {str(file.relative_to(staged)): file.stat().st_size for file in _files(staged)}
    (staged / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    for path in (*_files(staged), *_folders(staged)):
        flush(path)
    final = folder / staged.name
    replaced = folder / UNFINISHED / f"{staged.name}.replaced"
    if final.exists():  # of a run that went on from an older one: only now is there something better
        final.rename(replaced)
    staged.rename(final)
    flush(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


@contextmanager
def told_when_unwritten(folder: Path, memory: Path | None = None) -> Iterator[None]:
    """Turn what writing a checkpoint met (a full disk, a quota, a lost mount) into an error that says what is left.

    Every error: what C++ and Rust raise where a disk is full is not an OSError, and does not say so. memory: the folder
    in memory that the block writes to first.

    Raises:
        CheckpointError: the block met one. What it wrote aside is removed.
    """
    try:
        yield
    except Exception as error:
        logger.warning("a checkpoint was not written", exc_info=True)
        free, where = _free(memory or folder), f" in {memory.parent}" if memory else ""
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        raise CheckpointError(
            f"training.output_dir {folder}: no checkpoint could be written: {type(error).__name__}: {error}"
            f" ({free} free then{where}, and the last checkpoint took {_gigabytes(size_of_newest(folder))})."
            " Earlier ones are whole, and the next start goes on from the newest. Make room, or lower"
            " training.save_total_limit"
        ) from error


def _free(folder: Path) -> str:
    try:
        return _gigabytes(shutil.disk_usage(folder).free)
    except OSError as error:  # its mount is gone
        return f"no telling what is ({error})"


def warn_if_short(folder: Path) -> None:
    """Say beforehand that a checkpoint like the last one will not fit."""
    needed, free = size_of_newest(folder) * ROOM_TO_SPARE, shutil.disk_usage(folder).free
    if needed > free:
        logger.warning(
            "training.output_dir %s has %s free, and the last checkpoint took %s: the next one will not fit. Make room,"
            " or lower training.save_total_limit",
            folder,
            _gigabytes(free),
            _gigabytes(needed),
        )


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints of an output folder, whole or not, oldest first."""
    found = folder.glob(f"{PREFIX}*") if folder.is_dir() else ()
    return sorted((one for one in found if one.is_dir() and one.name.removeprefix(PREFIX).isdecimal()), key=step_of)


def size_of_newest(folder: Path) -> int:
    """Return the bytes of the newest checkpoint; 0 where there is none."""
    return sum(file.stat().st_size for newest in checkpoints_of(folder)[-1:] for file in _files(newest))


def _first_flaw(folder: Path) -> str | None:
    """Return the first file whose own form says that it was cut off."""
    for file in _files(folder):
        if file.suffix == ".safetensors" and not _safetensors_is_whole(file):
            return f"{file.name} is cut off"
        if file.suffix in TORCH_FILES and not zipfile.is_zipfile(file):
            return f"{file.name} is cut off"
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
    return None


def _safetensors_is_whole(file: Path) -> bool:
    """Whether a file is as long as its header says: 8 bytes, the header, the tensors (safetensors' format)."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\xff"))
        if length > file.stat().st_size:
            return False
        header = json.loads(opened.read(length))
    ends: list[int] = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return bool(file.stat().st_size == 8 + length + max(ends, default=0))


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _folders(folder: Path) -> list[Path]:
    return [*sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True), folder]


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"
