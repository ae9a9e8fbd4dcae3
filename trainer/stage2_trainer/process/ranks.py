"""The learner's processes: which one this is, what all of them exchange, and random numbers that they share."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
from torch import distributed

T = TypeVar("T")

PATIENCE = timedelta(days=7)


def rank() -> int:
    """Return this process's number among the learner's processes, from 0."""
    return int(distributed.get_rank()) if distributed.is_initialized() else 0


def world_size() -> int:
    """Return the number of learner processes."""
    return int(distributed.get_world_size()) if distributed.is_initialized() else 1


def gathered(value: T, group: distributed.ProcessGroup | None = None) -> list[T]:
    """Return the values that the processes of the group (default: all) passed, in rank order, without None.

    All of them must call it. One process needs no group.
    """
    if world_size() == 1:
        return [value]
    values: list[T | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return [one for one in values if one is not None]


def host_group() -> distributed.ProcessGroup | None:
    """Return a group in which all processes meet on the CPU, however long one waits; None for one process.

    All of them must call it. It blocks no GPU, and the connections of a process that dies close: the others' next call
    fails at once.
    """
    return distributed.new_group(backend="gloo", timeout=PATIENCE) if world_size() > 1 else None


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: of its GPU, or of the machine where it has none."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_bytes(device: torch.device) -> int:
    """Return the memory of this process's GPU, or of the machine where it has none."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def seeded_rng(key: Sequence[int], device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers from these whole numbers within the block, on the CPU and the device."""
    (seed,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield
