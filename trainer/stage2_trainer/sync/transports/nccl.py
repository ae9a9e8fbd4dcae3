"""The learner's side of one server's transfer group over NCCL: the other end is `engine.nccl`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

import torch

from stage2_api.vllm import Transport
from stage2_trainer.sync.transports.link import Link, abort_all, sent_by
from stage2_trainer.sync.transports.nccl_group import Communicator, NcclGroup
from stage2_trainer.sync.transports.nccl_ways import NcclLog
from stage2_trainer.sync.transports.one_group import OneGroup
from stage2_trainer.sync.transports.protocol import Packed
from stage2_trainer.sync.transports.rendezvous import Rendezvous
from stage2_trainer.sync.transports.transfer_group import LEARNER_RANK, GroupInfo
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import LinkError, ServerError

logger = logging.getLogger(__name__)


class NcclTransfer:
    """A transfer over NCCL, from the GPU's memory.

    communicator: makes what a group speaks with (NCCL). log: what NCCL writes of its choices.
    """

    transport: Transport = "nccl"

    def __init__(
        self,
        group_port: int,
        *,
        device: torch.device,
        token: str,
        bucket_bytes: int,
        timeout_s: float,
        communicator: Callable[[torch.device], Communicator] | None = None,
        log: NcclLog | None = None,
    ) -> None:
        self.staging = device
        self._shared: tuple[OneGroup, int] | None = None
        self._is_in_shared = False
        self._timeout_s = timeout_s
        self._communicator = communicator or nccl_communicator
        self._log = log or NcclLog.of_process(os.environ)
        self._sent_before = 0  # over links that are closed, and to NCCL
        self._links: list[Link] = []
        self._group: NcclGroup | None = None
        self._rendezvous = Rendezvous(
            group_port, transport=self.transport, token=token, bucket_bytes=bucket_bytes, timeout_s=timeout_s
        )

    def take_seat(self, group: OneGroup, seat: int) -> None:
        """Share a group with other servers for as long as it holds, from the next `connect` on."""
        self._shared = group, seat

    def connect(self, client: ServerClient) -> None:
        if self._shared is None or not self._join_shared(client, *self._shared):
            self._rendezvous.form(client, self._join)

    @property
    def group(self) -> str:
        return self._rendezvous.group

    @property
    def sent(self) -> int:
        return self._sent_before + sent_by(self._links)

    @property
    def ways(self) -> tuple[str, ...]:
        return self._log.ways()

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

    def aborter(self) -> Callable[[], None]:
        return partial(abort_all, tuple(self._links))

    def disconnect(self) -> None:
        abort_all(self._links)
        if self._shared is not None and self._is_in_shared:
            self._shared[0].part()
        self._is_in_shared = False
        group, self._group = self._group, None
        if group is not None:
            group.close()
        for link in self._links:
            link.close()
        self._sent_before += sent_by(self._links)
        self._links = []

    def close(self) -> None:
        self.disconnect()
        self._rendezvous.close()

    def _join_shared(self, client: ServerClient, group: OneGroup, seat: int) -> bool:
        """Enter the group of all servers; returns whether that is done. Where it is not, it is over for all of them."""

        def enter(links: list[Link], info: GroupInfo) -> None:
            self._links = links
            self._log.begin()
            group.enter(seat, links)

        if group.over:
            return False
        try:
            self._rendezvous.form(client, enter, partial(group.place, seat))
        except ServerError as error:
            logger.warning("%s; each server has an NCCL group of its own from here on", error)
            self._is_in_shared = True  # to be left
            self.disconnect()
        else:
            self._is_in_shared = True
        return self._is_in_shared

    def _join(self, links: list[Link], info: GroupInfo) -> None:
        self._links = links
        self._log.begin()
        communicator = self._communicator(self.staging)
        unique_id = communicator.new_unique_id()
        for link in links:
            link.send([unique_id], self._timeout_s)
        self._group = NcclGroup(communicator, links, self._timeout_s)
        self._group.open(unique_id, LEARNER_RANK, info.world_size)


def nccl_communicator(device: torch.device) -> Communicator:
    """Return a communicator of NCCL; its modules load where NCCL runs only."""
    from stage2_trainer.sync.transports.nccl_library import NcclCommunicator

    return NcclCommunicator(device)
