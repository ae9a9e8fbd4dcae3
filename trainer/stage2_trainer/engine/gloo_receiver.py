"""A worker's side of the gloo transfer group, the same for our vLLM engine and for the stub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from stage2_trainer.wire.buckets import TensorMeta, bucket_bytes, plan_buckets, unpack
from stage2_trainer.wire.gloo_group import GlooGroup, GroupInfo, announce, dial_store

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]


class Receiver:
    """A member of the learner's group, which hands on the tensors that it broadcasts."""

    def __init__(self) -> None:
        self._group: GlooGroup | None = None
        self._info: GroupInfo | None = None

    def join(self, info: GroupInfo, rank: int) -> None:
        """Enter the learner's group as `rank`; an earlier learner's group is left."""
        self.leave()
        store = dial_store(info)
        announce(store, info, rank)
        self._group = GlooGroup(store, info, rank)
        self._info = info

    def leave(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def receive(self, tensors: Sequence[TensorMeta], load: Load) -> None:
        """Receive the announced tensors, calling `load` for each bucket while the next one arrives.

        Raises:
            RuntimeError: there is no group, it broke, or a bucket did not arrive in time.
        """
        if self._group is None or self._info is None:
            raise RuntimeError("no transfer group: POST /init_weight_transfer_engine comes first")
        timeout = timedelta(seconds=self._info.timeout_s)
        arriving: tuple[list[TensorMeta], torch.Tensor, Any] | None = None
        for bucket in plan_buckets(tensors, self._info.packed_buffer_size_bytes):
            buffer = torch.empty(bucket_bytes(bucket), dtype=torch.uint8)
            work = self._group.broadcast(buffer)
            _land(arriving, load, timeout)
            arriving = (bucket, buffer, work)
        _land(arriving, load, timeout)


def _land(arriving: tuple[list[TensorMeta], torch.Tensor, Any] | None, load: Load, timeout: timedelta) -> None:
    if arriving is not None:
        bucket, buffer, work = arriving
        work.wait(timeout)
        load(unpack(bucket, buffer))
