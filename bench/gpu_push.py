"""A push of tensors into another process on the same device, by the ends that learner and servers have.

NCCL refuses two ranks on one GPU where their host hash is equal, so each process has a host id of its own: both then
speak NCCL's socket transport over loopback, as two pods of one node do.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from stage2_api.pod.layout import TOKEN_FILE_VARIABLE
from stage2_api.vllm import Transport
from stage2_trainer.sync.fleet.delivery import Packer
from stage2_trainer.sync.fleet.server import transfer_for
from stage2_trainer.sync.tensors.announcement import TensorMeta, plan_buckets
from stage2_trainer.sync.transports.link import GroupInfo
from stage2_trainer.sync.transports.receiver import Receiver
from stage2_trainer.sync.transports.transfer import WeightTransfer
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import LinkError

NCCL_ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
LEARNER, SERVER = "pod-learner", "pod-server"
TOKEN = "t"
TIMEOUT_S = 60.0
PUSHES = 4  # the first one finds nothing ready


def serve(pipe: Connection, transport: Transport, device: str, token_file: str) -> None:
    """Be a server's worker: join and receive as the pipe says, and report the sums of the tensors, or the error."""
    os.environ.update(NCCL_ENVIRONMENT, NCCL_HOSTID=SERVER, **{TOKEN_FILE_VARIABLE: token_file})
    place = torch.device(device)
    receiver = Receiver(transport, place)
    while True:
        verb, body = pipe.recv()
        try:
            if verb == "join":
                receiver.join(GroupInfo(**body), 1)
                pipe.send(None)
            else:
                pipe.send(_receive(receiver, place, *body))
        except LinkError as error:
            pipe.send(str(error))


def _receive(
    receiver: Receiver, device: torch.device, metas: Sequence[TensorMeta], group: str, summed: bool
) -> dict[str, float]:
    """Receive a push on the device; return the sum of each tensor, or 0 where sums are not requested."""
    got: dict[str, float] = {}

    def load(tensors: list[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            there = tensor.to(device)
            got[name] = sum_of(there) if summed else 0.0

    receiver.receive(metas, load, group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return got


def sum_of(tensor: Tensor) -> float:
    """Return the sum of all elements: it depends on each, and is exact for weights of 16 bits."""
    return float(tensor.double().sum())


class Client:
    """The routes of such a server, by a pipe."""

    base_url = "http://127.0.0.1:8000"

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def world_size(self) -> int:
        """Return how many workers there are."""
        return 1

    def post(self, path: str, phase: str, *, body: Mapping[str, Any]) -> None:
        """Have it join a group. Raises RuntimeError where it does not."""
        self.pipe.send(("join", body["init_info"]))
        if (error := self.pipe.recv()) is not None:
            raise RuntimeError(error)


@contextmanager
def server(transport: Transport, device: torch.device) -> Iterator[tuple[BaseProcess, Client]]:
    """Start such a worker; it is killed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(TOKEN)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, transport, str(device), str(token_file))
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        try:
            yield process, Client(ours)
        finally:
            process.kill()
            process.join()


@contextmanager
def transfer(transport: Transport, device: torch.device, bucket_bytes: int) -> Iterator[WeightTransfer]:
    """Be the learner of such a worker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    made = transfer_for(device, port, requested=transport, token=TOKEN, bucket_bytes=bucket_bytes, timeout_s=TIMEOUT_S)
    with patch.dict(os.environ, NCCL_ENVIRONMENT, NCCL_HOSTID=LEARNER):
        try:
            yield made
        finally:
            made.close()


def push(over: WeightTransfer, weights: Mapping[str, Tensor], device: torch.device, bucket_bytes: int) -> None:
    """Pack and send bucket by bucket."""
    packer, stream = Packer(device, over.staging), iter(weights.items())
    plan = list(plan_buckets(metas_of(weights), bucket_bytes))
    (slot,) = packer.slots(plan, 1)
    for bucket in plan:
        over.send(packer.pack(bucket, stream, slot))


def metas_of(weights: Mapping[str, Tensor]) -> list[TensorMeta]:
    """Return the metadata of tensors, as a server gets it."""
    return [TensorMeta(name, one.dtype, tuple(one.shape)) for name, one in weights.items()]


def seconds(transport: Transport, weights: Mapping[str, Tensor], device: torch.device, bucket_bytes: int) -> float:
    """Return the least wall time of several pushes, until the server has all of it on the device.

    Raises RuntimeError where other sums arrive than were sent.
    """
    times = []
    with server(transport, device) as (_, client), transfer(transport, device, bucket_bytes) as over:
        over.connect(cast(ServerClient, client))
        for number in range(PUSHES):
            summed = number == 0
            start = time.perf_counter()
            client.pipe.send(("receive", (metas_of(weights), over.group, summed)))
            push(over, weights, device, bucket_bytes)
            found = client.pipe.recv()
            times.append(time.perf_counter() - start)
            if summed and found != {name: sum_of(one) for name, one in weights.items()}:
                raise RuntimeError(f"over {transport} other weights arrived than were sent: {found}")
        over.disconnect()
    return min(times[1:])
