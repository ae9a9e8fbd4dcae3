"""Both ends of a transfer over NCCL: the learner's, and a worker's, at which buckets arrive in its GPU's memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from stage2_api.errors import EXIT_RETRYABLE
from stage2_trainer.process.background import in_background
from stage2_trainer.sync.transports.link import GroupInfo, Link, abort_all
from stage2_trainer.sync.transports.nccl_group import (
    UNIQUE_ID_BYTES,
    NcclCommunicator,
    NcclGroup,
    OneGroup,
)
from stage2_trainer.sync.transports.transfer import Packed, WeightTransfer
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import LinkError, ServerError

logger = logging.getLogger(__name__)

CreateCommunicator = Callable[[torch.device], NcclCommunicator]


class NcclTransfer(WeightTransfer):
    """A transfer from the learner's GPU.

    shared: the group that this server shares with others as long as it holds, and its seat there; None = its own group.
    communicator: creates NCCL's side (None = NCCL itself).
    """

    transport = "nccl"

    def __init__(
        self,
        port: int,
        device: torch.device,
        *,
        shared: tuple[OneGroup, int] | None = None,
        communicator: CreateCommunicator | None = None,
        **options: Any,
    ) -> None:
        super().__init__(port, **options)
        self.staging = device
        self._shared = shared
        self._is_in_shared = False
        self._communicator = communicator or NcclCommunicator
        self._group: NcclGroup | None = None

    def connect(self, client: ServerClient) -> None:
        if self._shared is None or not self._join_shared(client, *self._shared):
            self._form(client, self._enter)

    def send(self, packed: Packed) -> None:
        if self._shared is not None and self._is_in_shared:
            if self._shared[0].send(packed):
                self._sent_before += sum(part.nbytes for part in packed.parts)
            return
        if self._group is None:
            raise LinkError("the group was left")
        for part in packed.parts:
            self._group.broadcast(part, packed.ready)
            self._sent_before += part.nbytes

    def disconnect(self) -> None:
        abort_all(self._links)
        if self._shared is not None and self._is_in_shared:
            self._shared[0].end()
        self._is_in_shared = False
        group, self._group = self._group, None
        if group is not None:
            group.close()
        super().disconnect()

    def _join_shared(self, client: ServerClient, group: OneGroup, seat: int) -> bool:
        """Enter the group of all servers. Returns False if it has ended; a failure here ends it for all of them."""
        if group.ended:
            return False
        self._is_in_shared = True
        try:
            self._form(client, lambda: group.enter(seat, self._links), partial(group.ranks, seat))
        except ServerError as error:
            logger.warning("%s; each server has an NCCL group of its own from here on", error)
            self.disconnect()
        return self._is_in_shared

    def _enter(self) -> None:
        self._group = NcclGroup.create(self._communicator(self.staging), self._links, self._timeout_s)


def open_nccl(
    link: Link, info: GroupInfo, rank: int, device: torch.device, communicator: CreateCommunicator | None = None
) -> NcclInlet:
    """Join, as `rank`, the group whose id comes over the link. Raises LinkError."""
    group = NcclGroup((communicator or NcclCommunicator)(device), [link], info.timeout_s)
    inlet = NcclInlet(link, group, device)
    try:
        group.open(link.receive(UNIQUE_ID_BYTES, info.timeout_s), rank, info.world_size)
    except BaseException:
        inlet.close()
        raise
    return inlet


class NcclInlet:
    """A place in a group at which buckets arrive, one after the other."""

    def __init__(self, link: Link, group: NcclGroup, device: torch.device) -> None:
        self._link = link
        self._group = group
        self._device = device

    def start(self, nbytes: int) -> Future[torch.Tensor]:
        """Begin to receive the next bucket."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Work of this stream may still read what this memory held before.
        ready = torch.cuda.current_stream(self._device).record_event() if buffer.is_cuda else None
        return in_background(self._receive, buffer, ready)

    def end_push(self) -> None:
        """Do nothing: CUDA's allocator keeps the memory for the next push."""

    def close(self) -> None:
        """Leave the group. If NCCL does not release it, the process exits: it could never take weights again."""
        self._link.abort()
        if not self._group.close():
            logger.critical("this server must be started again: its NCCL group cannot be left")
            os._exit(EXIT_RETRYABLE)
        self._link.close()

    def _receive(self, buffer: torch.Tensor, ready: object) -> torch.Tensor:
        self._group.broadcast(buffer, ready)
        return buffer
