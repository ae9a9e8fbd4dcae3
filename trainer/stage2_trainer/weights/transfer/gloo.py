"""The learner's side of one server's transfer group over gloo: the other end is `engine.gloo`.

The learner is rank 0 and holds the rendezvous on `group_port`; the server's workers dial it. Each server has a group of
its own, so a lost server costs only its own.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from stage2_trainer.weights.transfer.protocol import INIT_PHASE, INIT_ROUTE, PendingBroadcast
from stage2_trainer.wire import gloo_group as gloo
from stage2_trainer.wire.address import host_and_port
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError

logger = logging.getLogger(__name__)

# Between two buckets a server waits for the slowest of all servers, which the learner gives `timeout_s`.
SERVER_PATIENCE = 2


def raise_if_failed(call: Future[Any]) -> Callable[[], None]:
    """Return a check that raises what the call to the server has raised."""

    def check() -> None:
        if call.done():
            call.result()

    return check


class GlooTransfer:
    """A transfer over gloo."""

    def __init__(self, group_port: int, *, bucket_bytes: int, timeout_s: float) -> None:
        self._port = group_port
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._store: Any = None  # opened once: the port stays ours, also while a lost server is waited for
        self._group: gloo.GlooGroup | None = None
        self._flying: _GlooPending | None = None

    def connect(self, client: ServerClient) -> None:
        info = self._info(client)
        try:
            self._store = self._store or gloo.open_store(info.master_address, self._port, self._timeout_s)
            init = in_background(client.post, INIT_ROUTE, INIT_PHASE, body={"init_info": info.to_wire()})
            gloo.wait_for_workers(self._store, info, self._timeout_s, raise_if_failed(init))
            self._group = gloo.GlooGroup(self._store, info, gloo.LEARNER_RANK)
            init.result(timeout=self._timeout_s)
            logger.info("server %s: transfer group with %d workers", client.base_url, info.world_size - 1)
        except (OSError, RuntimeError) as error:
            if isinstance(error, ServerError):
                raise
            detail = f"transfer group on {info.master_address}:{self._port}: {error}"
            raise ServerError(client.base_url, INIT_PHASE, detail) from error

    def broadcast(self, buffer: torch.Tensor) -> PendingBroadcast:
        assert self._group is not None
        self._flying = _GlooPending(self._group.broadcast(buffer))
        return self._flying

    def disconnect(self) -> None:
        if self._flying is not None:
            self._flying.forget()
        if self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        self.disconnect()
        self._store = None

    def _info(self, client: ServerClient) -> gloo.GroupInfo:
        host, port = host_and_port(client.base_url)
        return gloo.GroupInfo(
            master_address=gloo.address_towards(host, port),
            master_port=self._port,
            world_size=client.world_size() + 1,
            packed_buffer_size_bytes=self._bucket_bytes,
            name=uuid.uuid4().hex,
            timeout_s=SERVER_PATIENCE * self._timeout_s,
        )


class _GlooPending:
    """A broadcast. It keeps its group's port open, and tracebacks keep it alive: so it lets go when it ends."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        if self._work is None:
            return True
        if not self._work.is_completed():
            return False
        self._work.wait()  # returns at once, and raises what the broadcast raised
        self._work = None
        return True

    def forget(self) -> None:
        """Let go of a broadcast that nobody waits for any longer."""
        self._work = None
