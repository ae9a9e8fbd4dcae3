"""The choice of a transfer, by the configured transport and the learner's device."""

from __future__ import annotations

from functools import partial

import torch

from stage2_api.errors import ConfigError, Problem
from stage2_api.vllm import TRANSPORT_PATH, SyncTransport, resolve_transport
from stage2_trainer.sync.transports.nccl import NcclTransfer
from stage2_trainer.sync.transports.nccl_group import NcclCommunicator, OneGroup
from stage2_trainer.sync.transports.protocol import WeightTransfer
from stage2_trainer.sync.transports.rendezvous import Rendezvous
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

    device: where the weights are. shared: the server's seat in a group of all servers, for NCCL.

    Raises:
        ConfigError: NCCL is configured, and the weights are not on a GPU.
    """
    on_cuda = device.type == "cuda"
    transport = resolve_transport(requested, on_cuda=on_cuda)
    if transport == "nccl" and not on_cuda:
        rule, way_out = "NCCL needs a learner on a GPU", "set it to tcp, or leave it out"
        raise ConfigError((Problem(TRANSPORT_PATH, requested, rule, way_out),))
    rendezvous = Rendezvous(
        group_port, transport=transport, token=token, bucket_bytes=bucket_bytes, timeout_s=timeout_s
    )
    if transport == "tcp":
        return TcpTransfer(rendezvous, timeout_s=timeout_s)
    return NcclTransfer(rendezvous, device=device, timeout_s=timeout_s, shared=shared)


def one_group_for(device: torch.device, servers: int, *, requested: SyncTransport, timeout_s: float) -> OneGroup | None:
    """Return the group that so many servers share if weights travel over NCCL; None otherwise."""
    if resolve_transport(requested, on_cuda=device.type == "cuda") == "tcp":
        return None
    return OneGroup(servers, communicator=partial(NcclCommunicator, device), timeout_s=timeout_s)
