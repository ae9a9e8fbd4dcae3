"""The files of a checkpoint that PyTorch wrote, read as tensors and settings alone: a pickle may name any command.

`transformers` reads its own so. DeepSpeed (0.19) asks for whatever a pickle names, and its files hold four classes of
its own: those alone are let in, and PyTorch is told to let nobody ask for more.
"""

from __future__ import annotations

import importlib
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem

FORCED, UNFORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Variables of PyTorch: the first makes each of its loads one of tensors alone, whatever its caller asks for."""
DEEPSPEED_CLASSES = (
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
"""Module and name of what DeepSpeed's optimizers keep besides tensors: none of them does anything when it is made."""
SUFFIXES = frozenset({".pt", ".pth", ".bin"})
UNREAD = frozenset({"training_args.bin"})
"""Files of a checkpoint that nobody reads: a person's own script may."""
WAITING = "waiting-"
"""How the files of waiting segments begin, which are read by themselves (`learner.waiting_segments`)."""
WAY_OUT = (
    "take checkpoints only from whom you trust; remove this one, and the next start goes on from the one before, or"
    " start anew with --overwrite"
)
_NAMED = re.compile(r"(?:Unsupported (?:global|class): ?(?:GLOBAL )?|GLOBAL )([\w.]+\.\w+)")


@contextmanager
def tensors_alone(*, deepspeed: bool) -> Iterator[None]:
    """Let `torch.load` make nothing but tensors, settings and, with DeepSpeed, its four classes, whoever calls it.

    Raises:
        ConfigError: the environment demands the contrary.
    """
    from torch.serialization import safe_globals  # takes seconds, and is there when a trainer is built

    if os.environ.get(UNFORCED):
        rule = "must not be set: with it a file of a checkpoint may run commands"
        raise ConfigError([Problem(UNFORCED, os.environ[UNFORCED], rule, "take it out of the environment")])
    before = os.environ.get(FORCED)
    os.environ[FORCED] = "1"
    try:
        with safe_globals(_classes() if deepspeed else []):
            yield
    finally:
        if before is None:
            del os.environ[FORCED]
        else:
            os.environ[FORCED] = before


def refuse_code(checkpoint: Path, *, path: str) -> None:
    """Look into each file that a resume loads, without its tensors; `tensors_alone` must be in force.

    path: the key that led to the checkpoint, for errors.

    Raises:
        ConfigError: one holds something else; with the names in it that are not let in.
    """
    from transformers.trainer_pt_utils import safe_globals  # numpy's arrays, in the states of random numbers

    with safe_globals():
        for file in sorted(checkpoint.rglob("*")):
            if file.suffix in SUFFIXES and file.name not in UNREAD and not file.name.startswith(WAITING):
                load_tensors(file, path=path, map_location="meta", mmap=zipfile.is_zipfile(file))


def load_tensors(file: Path, classes: Sequence[Any] = (), *, path: str, **options: Any) -> Any:
    """Return what a file holds: tensors, settings and these classes. options: of `torch.load`.

    Raises:
        ConfigError: it holds something else, or nothing that can be read.
        OSError: the disk did not give it.
    """
    import torch

    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(file, weights_only=True, **options)
    except MemoryError:
        raise
    except Exception as error:  # a file that somebody made up raises what it likes
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the file: another try may go well
        named = _NAMED.search(str(error))
        first = (str(error).strip().splitlines() or [""])[0]
        said = f"it names {named[1]}" if named else f"{type(error).__name__}: {first}"
        rule = f"{file.name} must hold tensors and settings alone, for anything else may run a command ({said})"
        raise ConfigError([Problem(path, str(file.parent), rule, WAY_OUT)]) from error


def _classes() -> list[Any]:
    return [getattr(importlib.import_module(module), name) for module, name in DEEPSPEED_CLASSES]
