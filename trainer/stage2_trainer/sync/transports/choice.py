"""The choice of a transfer. NCCL is vLLM's own wrapper, so its modules are imported where they can run only."""

from __future__ import annotations

from functools import partial

import torch

from stage2_api.errors import ConfigError, Problem
from stage2_api.vllm import TRANSPORT_PATH, SyncTransport, resolve_transport
from stage2_trainer.sync.swift.swift_gloo import GlooSwiftGroup
from stage2_trainer.sync.transports.one_group import OneGroup
from stage2_trainer.sync.transports.protocol import SwiftGroup, WeightTransfer
from stage2_trainer.sync.transports.tcp import TcpTransfer


def transfer_for(
    device: torch.device,
    group_port: int,
    *,
    requested: SyncTransport,
    token: str,
    bucket_bytes: int,
    timeout_s: float,
    shared: tuple[OneGroup, int] | None = None,
) -> WeightTransfer:
    """Return the transfer to one server, whose workers dial `group_port` of the learner.

    device: the one that weights are on. shared: the server's seat in a group of all, for NCCL.

    Raises:
        ConfigError: NCCL is asked for, and weights are not on a GPU.
    """
    on_cuda = device.type == "cuda"
    if resolve_transport(requested, on_cuda=on_cuda) == "tcp":
        return TcpTransfer(group_port, token=token, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    if not on_cuda:
        rule, way_out = "NCCL needs a learner on a GPU", "set it to tcp, or leave it out"
        raise ConfigError((Problem(TRANSPORT_PATH, requested, rule, way_out),))
    from stage2_trainer.sync.transports.nccl import NcclTransfer

    transfer = NcclTransfer(group_port, device=device, token=token, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    if shared is not None:
        transfer.take_seat(*shared)
    return transfer


def one_group_for(device: torch.device, servers: int, *, requested: SyncTransport, timeout_s: float) -> OneGroup | None:
    """Return the group that so many servers share, where weights travel over NCCL; None elsewhere."""
    if resolve_transport(requested, on_cuda=device.type == "cuda") == "tcp":
        return None
    from stage2_trainer.sync.transports.nccl import nccl_communicator

    return OneGroup(servers, communicator=partial(nccl_communicator, device), timeout_s=timeout_s)


def swift_group_for(device: torch.device, host: str, port: int, *, workers: int, timeout_s: float) -> SwiftGroup:
    """Join the group that a server of `swift rollout` holds on `port`; the learner has the highest rank.

    Raises:
        OSError, RuntimeError: the group was not formed within `timeout_s` seconds.
    """
    if device.type == "cuda":
        from stage2_trainer.sync.swift.swift_nccl import NcclSwiftGroup

        return NcclSwiftGroup(host, port, workers, workers + 1, timeout_s)
    return GlooSwiftGroup(host, port, workers, workers + 1, timeout_s)
