"""The choice of a transfer by the device that weights are packed on: NCCL on CUDA, gloo elsewhere.

NCCL is vLLM's own wrapper, so its modules are imported where they can run only.
"""

from __future__ import annotations

import torch

from stage2_trainer.weights.transfer.gloo import GlooTransfer
from stage2_trainer.weights.transfer.protocol import SwiftGroup, WeightTransfer
from stage2_trainer.wire.swift_gloo import GlooSwiftGroup


def transfer_for(device: torch.device, group_port: int, *, bucket_bytes: int, timeout_s: float) -> WeightTransfer:
    """Return the transfer to one server, whose workers dial `group_port` of the learner."""
    if device.type == "cuda":
        from stage2_trainer.weights.transfer.nccl import NcclTransfer

        return NcclTransfer(group_port, device=device, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return GlooTransfer(group_port, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


def swift_group_for(device: torch.device, host: str, port: int, *, workers: int, timeout_s: float) -> SwiftGroup:
    """Join the group that a server of `swift rollout` holds on `port`; the learner has the highest rank.

    Raises:
        OSError, RuntimeError: the group was not formed within `timeout_s` seconds.
    """
    if device.type == "cuda":
        from stage2_trainer.weights.transfer.swift_nccl import NcclSwiftGroup

        return NcclSwiftGroup(host, port, workers, workers + 1, timeout_s)
    return GlooSwiftGroup(host, port, workers, workers + 1, timeout_s)
