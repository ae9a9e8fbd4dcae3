"""Tensor parallelism among the learner's processes: neighbours share one copy of the model and answer each other's
requests.

Processes form groups `[i * size, (i + 1) * size)`. Within a group every process runs the same full list of requests, as
tensor parallelism demands, and keeps the answers to its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import distributed

from stage2_api.errors import ConfigError, Problem

T = TypeVar("T")

SIZE_PATH = "custom.extra.rollout_matching.vllm.tensor_parallel_size"


def groups(world_size: int, size: int) -> list[list[int]]:
    """Return the ranks of every group.

    >>> groups(4, 2)
    [[0, 1], [2, 3]]

    Raises:
        ConfigError: the processes cannot be divided among groups of this size.
    """
    if world_size % size:
        rule = f"must divide the number of learner processes, which is {world_size}"
        raise ConfigError([Problem(SIZE_PATH, size, rule, "lower it, or start another number of processes")])
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def own_slice(counts: Sequence[int], place: int) -> slice:
    """Return where a member's own items lie in the list of all members' items.

    >>> own_slice([2, 0, 3], 2)
    slice(2, 5, None)
    """
    start = sum(counts[:place])
    return slice(start, start + counts[place])


class TensorParallel:
    """This process's group, made of the default process group; a group of one needs none."""

    def __init__(self, size: int) -> None:
        initialized = distributed.is_initialized()
        world, rank = (distributed.get_world_size(), distributed.get_rank()) if initialized else (1, 0)
        self.size = size
        self.place = rank % size
        self.ranks = range(rank - self.place, rank - self.place + size)
        self._group: distributed.ProcessGroup | None = None
        for ranks in groups(world, size):
            if size > 1:  # every process takes part in making every group
                made = distributed.new_group(ranks, backend="gloo")
                self._group = made if rank in ranks else self._group

    def together(self, items: Sequence[T]) -> tuple[list[T], slice]:
        """Return the items of all members in rank order, and where this one's own lie. All members must call it."""
        if self._group is None:
            return list(items), slice(0, len(items))
        found: list[list[T]] = [[] for _ in range(self.size)]
        distributed.all_gather_object(found, list(items), group=self._group)
        return [item for part in found for item in part], own_slice([len(part) for part in found], self.place)
