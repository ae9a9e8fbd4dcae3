"""Files of checkpoints that run a command when a pickle of theirs is loaded, in the place of those that were there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from stage2_trainer.model.checkpoints import MANIFEST


class Command:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def plant(file: Path, folder: Path) -> None:
    """Replace a file of a checkpoint by one that creates `folder` when a trusting program loads it."""
    torch.save({"state": Command(folder), "step": torch.ones(2)}, file)
    checkpoint = next(one for one in file.parents if (one / MANIFEST).exists())
    (checkpoint / MANIFEST).unlink()  # whoever can write the one can write the other
