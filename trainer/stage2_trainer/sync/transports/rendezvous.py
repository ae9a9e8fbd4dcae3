"""The way a server's workers come to the learner: told by the server's guarded route, let in by the token.

The learner listens on the server's `group_port`, and each worker dials it. Nothing that is dialled there is believed
before both sides have proved the job's token (`wire.handshake`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from stage2_api.vllm import Transport
from stage2_trainer.sync.transports.link import Link
from stage2_trainer.sync.transports.link_listener import LinkListener
from stage2_trainer.sync.transports.protocol import (
    INIT_PHASE,
    INIT_ROUTE,
    LEARNER_RANK,
    GroupInfo,
    address_towards,
    new_group_name,
)
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import LinkError, ServerError
from stage2_trainer.wire.names import host_and_port

logger = logging.getLogger(__name__)

# A server waits for the next bucket while the learner gives each of its servers `timeout_s` for this one.
SERVER_PATIENCE = 2

Join = Callable[[list[Link], GroupInfo], None]
Place = Callable[[int], tuple[int, int]]
"""Of so many workers: the rank of the first one, and the group's members in all."""


def of_its_own(workers: int) -> tuple[int, int]:
    """Return the place of workers in a group that they have to themselves with the learner."""
    return LEARNER_RANK + 1, workers + 1


class Rendezvous:
    """The learner's port for one server.

    timeout_s: seconds that forming a group may take. group: the name of the one that was formed last.
    """

    def __init__(self, port: int, *, transport: Transport, token: str, bucket_bytes: int, timeout_s: float) -> None:
        self.group = ""
        self._port = port
        self._transport = transport
        self._token = token
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._listener: LinkListener | None = None  # opened once: the port stays ours while a lost server is waited for

    def form(self, client: ServerClient, join: Join, place: Place = of_its_own) -> None:
        """Call the server's workers, and let `join` make a group of their links, by rank, while the server waits.

        place: finds their ranks.

        Raises:
            ServerError: the server refuses, or its workers do not come.
        """
        workers = client.world_size()
        info = self._info(client, workers, place)
        try:
            self._listener = self._listener or LinkListener(info.master_address, self._port, self._token)
            self._listener.expect(info.members(workers))
            init = in_background(client.post, INIT_ROUTE, INIT_PHASE, body={"init_info": info.to_wire()})
            join(self._links(self._listener, info, workers, init), info)
            init.result(timeout=self._timeout_s)
            self.group = info.name
        except (OSError, RuntimeError) as error:
            if self._listener is not None:
                self._listener.expect(())
            if isinstance(error, ServerError):
                raise
            detail = f"transfer group on {info.master_address}:{self._port}: {error}"
            raise ServerError(client.base_url, INIT_PHASE, detail) from error
        logger.info("server %s: transfer group with %d workers", client.base_url, workers)

    def close(self) -> None:
        """Give the port back."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _links(self, listener: LinkListener, info: GroupInfo, workers: int, init: Future[Any]) -> list[Link]:
        try:
            return listener.take(self._timeout_s, raise_if_failed(init))
        except TimeoutError as error:
            dialled = f"not all of its {workers} workers dialled {info.master_address}:{info.master_port}"
            raise TimeoutError(f"{dialled} within {self._timeout_s:g} s") from error

    def _info(self, client: ServerClient, workers: int, place: Place) -> GroupInfo:
        host, port = host_and_port(client.base_url)
        try:
            address = address_towards(host, port)
        except OSError as error:
            raise ServerError(client.base_url, INIT_PHASE, f"no way to {host}: {error.strerror or error}") from error
        try:
            rank_offset, members = place(workers)
        except LinkError as error:
            raise ServerError(client.base_url, INIT_PHASE, str(error)) from error
        return GroupInfo(
            transport=self._transport,
            master_address=address,
            master_port=self._port,
            rank_offset=rank_offset,
            world_size=members,
            packed_buffer_size_bytes=self._bucket_bytes,
            name=new_group_name(),
            timeout_s=SERVER_PATIENCE * self._timeout_s,
        )


def raise_if_failed(call: Future[Any]) -> Callable[[], None]:
    """Return a check that raises what the call to the server has raised."""

    def check() -> None:
        if call.done():
            call.result()

    return check
