"""Checkpoints on disk: each is whole or not there. They are staged, checked, flushed, listed, and then renamed.

A crash, a full disk or a SIGKILL at any moment leaves the earlier checkpoints as they were, and at most a folder of
unfinished files, which the next save removes. `transformers` and others write a checkpoint as a dozen files; it gets
its name when all of them are on disk, so whatever has such a name is whole (fsync, then an atomic rename).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stage2_api.course import FOLLOWS_LENGTH, LENGTH, course_of
from stage2_api.errors import ConfigError, Problem, shortened
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.model_files import model_fingerprint
from stage2_trainer.data.records import Fingerprint

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
"""The folder below the output folder in which a checkpoint is written."""
MANIFEST = "stage2_checkpoint.json"
"""Lists a checkpoint's files: {"files": {name: bytes}, "proved_step": 12}."""
COURSE = "stage2_course.json"
DEEPSPEED_STATES = "global_step*"
DEEPSPEED_SHARDS = f"{DEEPSPEED_STATES}/*zero_pp_rank_*_optim_states.pt"  # one of each process
PREFIX = "checkpoint-"
UNPROVED = "unproved-"
"""Put before the name of a checkpoint that no start may resume from: servers may have answered with other weights."""
STATE = "trainer_state.json"
TENSOR_FILES = frozenset({".safetensors", ".pt", ".pth", ".bin"})


class CheckpointError(OSError):
    """A checkpoint could not be written; the earlier ones are untouched."""


class NonFiniteError(RuntimeError):
    """A loss, a gradient or a weight is infinite or NaN; the optimizer has not stepped, and nothing was saved.

    A restart may not meet it: it resumes from the last checkpoint, all of whose weights were finite.
    """


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of an output folder, whole or not, oldest first."""
    found = folder.glob(f"{PREFIX}*") if folder.is_dir() else ()
    return sorted((one for one in found if one.is_dir() and one.name.removeprefix(PREFIX).isdecimal()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix(PREFIX))


def newest_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole; None without one. Logs a warning for each that it skips."""
    for checkpoint in reversed(list_checkpoints(folder)):
        flaw = flaw_of(checkpoint)
        if flaw is None:
            return checkpoint
        logger.warning("skipping %s, and looking for an older checkpoint: %s", checkpoint, flaw)
    return None


def best_whole(folder: Path) -> Path | None:
    """Return the best checkpoint of an output folder, or the newest where none is; None without a whole one."""
    newest = newest_whole(folder)
    if newest is None:
        return None
    named = json.loads((newest / STATE).read_text(encoding="utf-8")).get("best_model_checkpoint")
    best = newest.with_name(Path(named or newest.name).name)
    return newest if flaw_of(best) else best


def flaw_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if it is whole.

    A checkpoint without a manifest comes from elsewhere: it must have the file that `transformers` writes last.
    """
    try:
        if not (checkpoint / MANIFEST).exists():
            json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
            return _first_flaw(checkpoint)
        listed: dict[str, int] = _manifest(checkpoint)["files"]
        for name, size in listed.items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, and {size} were written"
        return None
    except OSError as error:
        return f"{error.filename or checkpoint}: {error.strerror}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def proved_step_of(checkpoint: Path) -> int | None:
    """Return the newest step whose weight sync was proved before a checkpoint was saved; None if it does not say."""
    try:
        step = _manifest(checkpoint).get("proved_step")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # `flaw_of` reports what is broken
    return step if type(step) is int and step >= 0 else None


def trained_step_of(checkpoint: Path) -> int:
    """Return the optimizer step from which a run resumes with a whole checkpoint, whatever its folder is called."""
    step: int = _state(checkpoint)["global_step"]
    return step


def ends_training(checkpoint: Path, *, max_steps: int, epochs: float) -> int | None:
    """Return a checkpoint's step if training for `max_steps`, or else `epochs`, ends with it; else None.

    max_steps: -1 leaves it to the epochs.
    """
    state = _state(checkpoint)
    step: int = state["global_step"]
    if max_steps > 0:
        return step if step >= max_steps else None
    return step if step >= state["max_steps"] and epochs <= state["num_train_epochs"] else None


def create_staging(folder: Path) -> Path:
    """Create the empty folder in which the next checkpoint is written; leftovers of an earlier save are removed."""
    aside = folder / UNFINISHED
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def publish(staged: Path, folder: Path, *, proved_step: int | None = None) -> Path:
    """Give a staged checkpoint its name in the output folder, once all of it is on disk and can be read.

    Raises:
        CheckpointError: a file is cut off.
    """
    if flaw := _first_flaw(staged):
        raise CheckpointError(f"{staged.name} was not written whole: {flaw}")
    files = {str(file.relative_to(staged)): file.stat().st_size for file in _files(staged)}
    manifest = {"files": files, "proved_step": proved_step}
    (staged / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*_files(staged), *_folders(staged)):
        _fsync(path)
    final = folder / staged.name
    replaced = folder / UNFINISHED / f"{staged.name}.replaced"
    if final.exists():  # of a run that resumed from an older one: only now is there something better
        final.rename(replaced)
    staged.rename(final)
    _fsync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def set_aside_after(step: int, folder: Path) -> None:
    """Rename the checkpoints of later steps, so that the next start resumes from an older one."""
    for checkpoint in list_checkpoints(folder):
        if step_of(checkpoint) <= step:
            continue
        aside = folder / f"{UNPROVED}{checkpoint.name}"
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        text = "%s was saved after the last proof that servers have the learner's weights, and is renamed to %s"
        logger.error(text, checkpoint.name, aside)
    _fsync(folder)


@contextmanager
def checkpoint_errors(folder: Path) -> Iterator[None]:
    """Turn whatever fails while a checkpoint is written (a full disk, a quota, a lost mount) into a CheckpointError.

    Every error: what C++ and Rust raise when a disk is full is no OSError, and does not name the cause.

    Raises:
        CheckpointError: the block failed. What it staged is removed.
    """
    try:
        yield
    except Exception as error:
        logger.warning("a checkpoint could not be written", exc_info=True)
        free = _free(folder)
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        raise CheckpointError(
            f"training.output_dir {folder}: no checkpoint could be written: {type(error).__name__}: {error}"
            f" ({free} free, and the last checkpoint took {_gigabytes(size_of(list_checkpoints(folder)[-1:]))})."
            " Earlier ones are whole, and the next start resumes from the newest. Make room, or lower"
            " training.save_total_limit"
        ) from error


def run_course(config: RunConfig, data: Fingerprint, *, world_size: int) -> dict[str, Any]:
    """Return what the weights of a run depend on: configuration path to value, data and model by their content."""
    course = course_of(config, world_size=world_size)
    course["custom.train_jsonl"] = f"{data.records} records, sha256 {data.sha256}"
    try:
        course["model.model"] = f"sha256 {model_fingerprint(config.model.model)}"
    except OSError as error:  # the loader of the model reports it better
        logger.debug("no fingerprint of model.model: %s", error)
    return course


def write_course(course: Mapping[str, Any], checkpoint: Path) -> None:
    """Write into a checkpoint what its run depends on."""
    (checkpoint / COURSE).write_text(json.dumps(dict(course), indent=1, ensure_ascii=False), encoding="utf-8")


def check_course(checkpoint: Path, course: Mapping[str, Any], *, allow_changes: bool) -> None:
    """Compare the run that wrote a checkpoint with the one that is to resume from it.

    A key that either of them lacks is not compared: it came or went with a version of stage2.

    Raises:
        ConfigError: they differ, and `allow_changes` is false; with every difference.
    """
    try:
        written: dict[str, Any] = json.loads((checkpoint / COURSE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        logger.warning("%s does not record the settings of its run: nothing is compared", checkpoint)
        return
    now = json.loads(json.dumps(dict(course)))
    changed = {path: then for path, then in written.items() if path in now and now[path] != then}
    if changed and not allow_changes:
        way_out = (
            "set it back, name another training.output_dir, start over with --overwrite, or resume all the same with"
            " training.resume: allow-changes"
        )
        follows = f", and {FOLLOWS_LENGTH.format(now.get('training.lr_scheduler_type'))}"
        raise ConfigError(
            Problem(
                path,
                now[path],
                f"the run of {checkpoint} has {_setting(then)}{follows if path in LENGTH else ''}",
                way_out,
            )
            for path, then in changed.items()
        )
    for path, then in changed.items():
        text = "%s: %s differs from %s in %s (training.resume allows it)"
        logger.warning(text, path, _setting(now[path]), _setting(then), checkpoint)


def _setting(value: object) -> str:
    """Return a setting as a file has it: a person may have to write it again, so little is cut off."""
    return shortened(value, limit=2000)


def divided_among(checkpoint: Path) -> int:
    """Return among how many processes DeepSpeed divided the optimizer's state of a checkpoint; 0: it did not."""
    return len(list(checkpoint.glob(DEEPSPEED_SHARDS)))


def _state(checkpoint: Path) -> Any:
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def _manifest(checkpoint: Path) -> Any:
    return json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))


def size_of(checkpoints: Iterable[Path]) -> int:
    """Return the bytes of these checkpoints on disk."""
    return sum(file.stat().st_size for checkpoint in checkpoints for file in _files(checkpoint))


def _first_flaw(folder: Path) -> str | None:
    """Return the first file whose own format shows that it was cut off."""
    for file in _files(folder):
        if file.suffix in TENSOR_FILES and not _is_whole(file):
            return f"{file.name} is cut off"
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
    return None


def _is_whole(file: Path) -> bool:
    """Whether a file of tensors is as long as its own format says."""
    if file.suffix != ".safetensors":
        return zipfile.is_zipfile(file)
    try:
        with safe_open(file, framework="np"):
            return True
    except SafetensorError:
        return False


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _folders(folder: Path) -> list[Path]:
    return [*sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True), folder]


def _fsync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _free(folder: Path) -> str:
    try:
        return _gigabytes(shutil.disk_usage(folder).free)
    except OSError as error:  # its mount is gone
        return f"unknown space ({error})"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"
