"""The worker's end of an NCCL group: buckets arrive in its GPU's memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future

import torch

from stage2_trainer.sync.transports.link import Link
from stage2_trainer.sync.transports.nccl import nccl_communicator
from stage2_trainer.sync.transports.nccl_group import UNIQUE_ID_BYTES, Communicator, NcclGroup
from stage2_trainer.sync.transports.transfer_group import GroupInfo
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.errors import LinkError

logger = logging.getLogger(__name__)


def open_nccl(
    link: Link,
    info: GroupInfo,
    rank: int,
    device: torch.device,
    communicator: Callable[[torch.device], Communicator] = nccl_communicator,
) -> NcclInlet:
    """Join, as `rank`, the group whose id comes over the link. Raises LinkError."""
    group = NcclGroup(communicator(device), [link], info.timeout_s)
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
        self._last: Future[torch.Tensor] | None = None

    def start(self, nbytes: int) -> Future[torch.Tensor]:
        """Begin to receive the next bucket."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # What this memory held before may still be read by work of this stream.
        ready = torch.cuda.current_stream(self._device).record_event() if buffer.is_cuda else None
        self._last = in_background(self._receive, buffer, ready, self._last)
        return self._last

    def rest(self) -> None:
        """Give back what only a push needs."""
        self._last = None

    def close(self) -> None:
        """Leave the group. A process that NCCL does not let go ends: it could never take weights again."""
        self._link.abort()
        if not self._group.close():
            logger.critical("this server must be started again: its NCCL group cannot be left")
            os._exit(os.EX_SOFTWARE)
        self._link.close()

    def _receive(self, buffer: torch.Tensor, ready: object, before: Future[torch.Tensor] | None) -> torch.Tensor:
        if before is not None and before.exception() is not None:
            raise LinkError("a bucket before it did not arrive")
        self._group.broadcast(buffer, ready)
        return buffer
