"""Random draws that follow from what they are for, not from what was drawn before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def drawn(key: Sequence[int], device: torch.device) -> Iterator[None]:
    """Let torch draw what these whole numbers say, on the CPU and the device; draws after it are not changed."""
    (seed,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield
