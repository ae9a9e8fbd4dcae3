"""Segments that wait for a packed row, kept with a checkpoint: a run that goes on from it trains on them too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stage2_trainer.data.encode import Encoding
from stage2_trainer.learner.padding_free_batch import Placed, Segment
from stage2_trainer.learner.rollout_metrics import SampleStats
from stage2_trainer.matching import SegmentMeta
from stage2_trainer.process.ranks import rank, world_size
from stage2_trainer.process.tensor_files import WAITING, load_tensors

PARTS: list[Any] = [Segment, Placed, Encoding, SegmentMeta, SampleStats]
"""The classes that a waiting segment is made of."""


def save_waiting(folder: Path, segments: Sequence[Segment]) -> None:
    """Write this process's waiting segments into a checkpoint's folder; nothing where none waits."""
    if segments:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(list(segments), folder / f"{WAITING}{rank():05d}.pt")


def load_waiting(folder: Path) -> list[Segment]:
    """Return what waited when the checkpoint was written, shared out among as many processes as there are now.

    Raises:
        ConfigError: a file names something else, which is not loaded and so never run.
    """
    files = sorted(folder.glob(f"{WAITING}*.pt"))[rank() :: world_size()]
    return [one for file in files for one in load_tensors(file, PARTS, path="training.resume_from_checkpoint")]
