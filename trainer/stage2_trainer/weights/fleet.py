"""All rollout servers of a run: one round of calls and broadcasts to every one of them at once, and who failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch

from stage2_api.vllm import ServerAddress
from stage2_trainer.weights.merge import WeightSource
from stage2_trainer.weights.sync_session import SyncSession
from stage2_trainer.weights.transfer.choice import transfer_for
from stage2_trainer.weights.transfer.protocol import PendingBroadcast
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.buckets import TensorMeta, bucket_bytes, buffers_for, pack, plan_buckets, to_wire
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError, join_errors

POLL_INTERVAL_S = 0.0001  # a bucket of the usual size takes milliseconds, and nothing is sent between two
BUFFERS = 2  # one is on its way while the other is packed


@dataclass(frozen=True)
class Shipment:
    """The tensors for servers that need the same.

    header: what the announcement says beside names, dtypes and shapes.
    """

    source: WeightSource
    header: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that each server is sent."""
        return bucket_bytes(self.source.metadata())


class FleetUpdate:
    """The servers of one sync that have not failed yet, and the failures of the others."""

    def __init__(self, sessions: Sequence[SyncSession]) -> None:
        self.fit = list(sessions)
        self._failures: list[ServerError] = []

    def guard(self, session: SyncSession, step: Callable[..., Any], *arguments: Any) -> None:
        """Run a step of one server; if it fails, give the server up for this round."""
        try:
            step(*arguments)
        except ServerError as error:
            self._failures.append(error)
            self.fit = [other for other in self.fit if other is not session]
            session.lose()

    def each(self, step: Callable[..., Any], *arguments: Any) -> None:
        """Run a step on every fit server, all at once."""
        running = {session: in_background(step, session, *arguments) for session in self.fit}
        for session, future in running.items():
            self.guard(session, future.result)

    def raise_failures(self) -> None:
        """Raise what has failed, as one error."""
        if self._failures:
            raise join_errors(self._failures)


class Fleet:
    """The servers and the transfer group of each.

    servers: where they are, and the learner-side port of each one's transfer group.
    timeout_s: seconds that a call, forming a group, or sending one bucket may take.
    device: where buckets are packed; CUDA sends over NCCL, anything else over gloo.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        *,
        token: str,
        timeout_s: float,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self.sessions = [
            SyncSession(
                ServerClient(address.base_url, token, timeout_s=timeout_s),
                transfer_for(device, address.group_port, bucket_bytes=bucket_bytes, timeout_s=timeout_s),
            )
            for address in servers
        ]

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The servers' base URLs, in order."""
        return tuple(session.client.base_url for session in self.sessions)

    def close(self) -> None:
        """Leave all groups."""
        for session in self.sessions:
            session.close()

    @contextmanager
    def update(self) -> Iterator[FleetUpdate]:
        """Open an update on every server; the block pushes and closes it.

        An error of our own in the block gives every server up: they would wait for the rest until their deadline.

        Raises:
            ServerError: at the end, one or more servers failed. The others went through.
        """
        update = FleetUpdate(self.sessions)
        update.each(SyncSession.begin)
        try:
            yield update
        except BaseException:
            for session in update.fit:
                session.lose()
            raise
        update.raise_failures()

    def push(
        self,
        shipment: Shipment,
        sessions: Sequence[SyncSession],
        update: FleetUpdate,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Send every bucket to these servers at once, packing the next one while one is on its way.

        meanwhile: what the learner does once all is sent, while the servers load it.
        """
        metas = shipment.source.metadata()
        plan = list(plan_buckets(metas, self._bucket_bytes))
        update_info, timeout_s = {**to_wire(metas), **shipment.header}, self._timeout_s * (len(plan) + 1)
        calls = {session: session.receive(update_info, timeout_s) for session in sessions}
        tensors = iter(shipment.source)
        flying: dict[SyncSession, PendingBroadcast] = {}
        sent: list[TensorMeta] = []
        buffers = cycle(buffers_for(plan, self._device, BUFFERS))
        for bucket, memory in zip(plan, buffers, strict=False):
            buffer = pack(bucket, tensors, memory)
            self._land(flying, calls, sent, update)
            flying, sent = (
                {session: session.transfer.broadcast(buffer) for session in calls if session in update.fit},
                bucket,
            )
        self._land(flying, calls, sent, update)
        if meanwhile is not None:
            meanwhile()
        for session, call in calls.items():
            if session in update.fit:
                update.guard(session, _confirm, session, call, self._timeout_s)

    def _land(
        self,
        flying: dict[SyncSession, PendingBroadcast],
        calls: dict[SyncSession, Future[Any]],
        bucket: list[TensorMeta],
        update: FleetUpdate,
    ) -> None:
        """Wait until a bucket has reached every fit server; one that fails or is late is given up."""
        deadline = time.monotonic() + self._timeout_s
        for session, pending in flying.items():
            update.guard(session, _wait, session, pending, calls[session], bucket, deadline)


def _confirm(session: SyncSession, call: Future[Any], timeout_s: float) -> None:
    """Wait until the server says that it has taken everything."""
    try:
        call.result(timeout=timeout_s)
    except TimeoutError as error:
        detail = f"all tensors sent, but not confirmed within {timeout_s:g} s"
        raise ServerError(session.client.base_url, "push", detail) from error


def _wait(
    session: SyncSession, pending: PendingBroadcast, call: Future[Any], bucket: list[TensorMeta], deadline: float
) -> None:
    """Wait for one broadcast. The server's own answer comes first: it says more than a broken connection."""
    what = f"tensors {bucket[0].name} to {bucket[-1].name}"
    try:
        while not pending.done():
            if call.done():
                call.result()
            if time.monotonic() > deadline:
                raise ServerError(session.client.base_url, "push", f"{what} not taken in time")
            time.sleep(POLL_INTERVAL_S)
    except ServerError:
        raise
    except RuntimeError as error:
        raise ServerError(session.client.base_url, "push", f"{what}: {error}") from error
