"""Reading PyTorch's checkpoint files safely, as tensors and settings only: a pickle may run any command.

`transformers` reads its own files so. DeepSpeed (0.19) would load whatever a pickle names. Its files hold four classes
of its own; only those are allowed, and PyTorch refuses any other for every caller.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from stage2_api.errors import refused
from stage2_trainer.model.checkpoints import DEEPSPEED_STATES

FORCED, UNFORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Variables of PyTorch: the first restricts every load to tensors, whatever the caller asks for."""
DEEPSPEED_CLASSES = (
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
"""Module and name of what DeepSpeed's optimizers keep besides tensors; constructing one has no side effect."""
SUFFIXES = frozenset({".pt", ".pth", ".bin"})
UNREAD = frozenset({"training_args.bin"})
"""Files of a checkpoint that a resume does not read."""
WAITING = "waiting-"
"""Prefix of the files of waiting segments, which `learner.rows` reads."""
WAY_OUT = (
    "use checkpoints only from people you trust; remove this one, and the next start resumes from the one before, or"
    " start over with --overwrite"
)
_NAMED = re.compile(r"(?:Unsupported (?:global|class): ?(?:GLOBAL )?|GLOBAL )([\w.]+\.\w+)")


@contextmanager
def tensors_alone(*, deepspeed: bool) -> Iterator[None]:
    """Restrict `torch.load`, for every caller, to tensors, settings and, with DeepSpeed, its four classes.

    Raises:
        ConfigError: the environment demands the contrary.
    """
    from torch.serialization import safe_globals  # takes seconds to import; a trainer needs it anyway

    if os.environ.get(UNFORCED):
        rule = "must not be set: with it a file of a checkpoint may run commands"
        raise refused(UNFORCED, os.environ[UNFORCED], rule, "unset it")
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


def refuse_code(checkpoint: Path, *, path: str, deepspeed: bool) -> None:
    """Check each file that a resume loads, without reading its tensors; `tensors_alone` must be active.

    path: the configuration key that names the checkpoint, for errors. deepspeed: whether DeepSpeed loads its state.

    Raises:
        ConfigError: a file holds something else; names what is not allowed.
    """
    from transformers.trainer_pt_utils import safe_globals  # numpy's arrays, in the states of random numbers

    with safe_globals():
        for file in sorted(checkpoint.rglob("*")):
            if not deepspeed and fnmatch(file.relative_to(checkpoint).parts[0], DEEPSPEED_STATES):
                continue
            if file.suffix in SUFFIXES and file.name not in UNREAD and not file.name.startswith(WAITING):
                load_tensors(file, path=path, map_location="meta", mmap=zipfile.is_zipfile(file))


def load_tensors(file: Path, classes: Sequence[Any] = (), *, path: str, **options: Any) -> Any:
    """Return the content of a file: tensors, settings and these classes. options: of `torch.load`.

    Raises:
        ConfigError: it holds something else, or cannot be read.
        OSError: the disk failed.
    """
    import torch

    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(file, weights_only=True, **options)
    except MemoryError:
        raise
    except Exception as error:  # a forged file can raise anything
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the file: a retry may succeed
        named = _NAMED.search(str(error))
        first = (str(error).strip().splitlines() or [""])[0]
        why = f"it names {named[1]}" if named else f"{type(error).__name__}: {first}"
        rule = f"{file.name} must hold tensors and settings only, since anything else may run a command ({why})"
        raise refused(path, str(file.parent), rule, WAY_OUT) from error


def _classes() -> list[Any]:
    allowed = [getattr(importlib.import_module(module), name) for module, name in DEEPSPEED_CLASSES]
    return [*allowed, (_member, "builtins.getattr")]


def _member(kind: Any, name: Any) -> Enum:
    """Return a member of an allowed enumeration: Python 3.11.2, of Debian 12, pickles it as a call of `getattr`."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError("GLOBAL builtins.getattr of what is no enumeration")
    return kind[name]
