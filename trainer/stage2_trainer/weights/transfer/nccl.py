"""The learner's side of vLLM's own nccl engine: the packed broadcasts that it expects, sent from our buckets."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

from stage2_trainer.weights.transfer.protocol import INIT_PHASE, INIT_ROUTE, PendingBroadcast
from stage2_trainer.wire.address import host_and_port
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.gloo_group import LEARNER_RANK, address_towards

logger = logging.getLogger(__name__)

BUFFERS = 2  # buckets that a receiver may hold: the one that it loads and the one that arrives


class NcclTransfer:
    """A transfer over NCCL to a server whose engine was started with the backend "nccl"."""

    def __init__(self, group_port: int, *, device: torch.device, bucket_bytes: int, timeout_s: float) -> None:
        self._port = group_port
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._communicator: PyNcclCommunicator | None = None

    def connect(self, client: ServerClient) -> None:
        """Form the group; the store's waits end after `timeout_s`."""
        host, port = host_and_port(client.base_url)
        address, world_size = address_towards(host, port), client.world_size() + 1
        init_info = {
            "master_address": address,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": self._bucket_bytes,
            "packed_num_buffers": BUFFERS,
        }
        init = in_background(client.post, INIT_ROUTE, INIT_PHASE, body={"init_info": init_info})
        try:
            group = StatelessProcessGroup.create(
                address, self._port, LEARNER_RANK, world_size, store_timeout=int(self._timeout_s)
            )
            self._communicator = PyNcclCommunicator(group, device=self._device)
        except (OSError, RuntimeError) as error:
            detail = f"transfer group on {address}:{self._port}: {error}"
            raise ServerError(client.base_url, INIT_PHASE, detail) from error
        init.result(timeout=self._timeout_s)
        logger.info("server %s: transfer group with %d workers", client.base_url, world_size - 1)

    def broadcast(self, buffer: torch.Tensor) -> PendingBroadcast:
        """Enqueue the broadcast on the current stream."""
        assert self._communicator is not None
        self._communicator.broadcast(buffer, src=LEARNER_RANK, stream=torch.cuda.current_stream(self._device))
        return _NcclPending(torch.cuda.current_stream(self._device).record_event())

    def disconnect(self) -> None:
        """Leave the group."""
        if self._communicator is not None:
            self._communicator.destroy()  # type: ignore[no-untyped-call]
            self._communicator = None

    def close(self) -> None:
        """Leave the group; the port went with it."""
        self.disconnect()


class _NcclPending:
    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())
