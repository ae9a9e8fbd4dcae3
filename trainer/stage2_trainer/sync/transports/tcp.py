"""The learner's side of one server's transfer group over TCP: the other end is `engine.tcp`.

Each worker has a link of its own, so what one of them does not take keeps none of the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from stage2_api.vllm import Transport
from stage2_trainer.sync.transports.link import Link, abort_all, sent_by
from stage2_trainer.sync.transports.protocol import Packed
from stage2_trainer.sync.transports.rendezvous import Rendezvous
from stage2_trainer.sync.transports.transfer_group import GroupInfo
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.client import ServerClient


class TcpTransfer:
    """A transfer over TCP, from main memory."""

    transport: Transport = "tcp"
    staging = torch.device("cpu")

    def __init__(self, group_port: int, *, token: str, bucket_bytes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._links: list[Link] = []
        self._sent_before = 0  # over links that are closed
        self._rendezvous = Rendezvous(
            group_port, transport=self.transport, token=token, bucket_bytes=bucket_bytes, timeout_s=timeout_s
        )

    def connect(self, client: ServerClient) -> None:
        self._rendezvous.form(client, self._join)

    @property
    def group(self) -> str:
        return self._rendezvous.group

    @property
    def sent(self) -> int:
        return self._sent_before + sent_by(self._links)

    @property
    def ways(self) -> tuple[str, ...]:
        return ()

    def send(self, packed: Packed) -> None:
        if packed.ready is not None:
            packed.ready.synchronize()
        parts = [part.numpy().data for part in packed.parts]
        others = [in_background(link.send, parts, self._timeout_s) for link in self._links[1:]]
        self._links[0].send(parts, self._timeout_s)
        for other in others:
            other.result()

    def aborter(self) -> Callable[[], None]:
        return partial(abort_all, tuple(self._links))

    def disconnect(self) -> None:
        for link in self._links:
            link.close()
        self._sent_before += sent_by(self._links)
        self._links = []

    def close(self) -> None:
        self.disconnect()
        self._rendezvous.close()

    def _join(self, links: list[Link], info: GroupInfo) -> None:
        self._links = links
