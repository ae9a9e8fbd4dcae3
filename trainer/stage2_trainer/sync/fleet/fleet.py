"""All rollout servers of a run: one round of calls and broadcasts to every one of them at once, and who failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from stage2_api.vllm import ServerAddress, SyncTransport, Transport
from stage2_trainer.sync.fleet.delivery import Delivery, Parcel, SlotPool
from stage2_trainer.sync.fleet.server_recipe import noted
from stage2_trainer.sync.fleet.sync_phases import SyncPhases
from stage2_trainer.sync.fleet.sync_session import SyncSession
from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge import WeightSource
from stage2_trainer.sync.tensors.packing import Packer
from stage2_trainer.sync.transports.buckets import TensorMeta, bucket_bytes, plan_buckets, to_wire
from stage2_trainer.sync.transports.choice import one_group_for, transfer_for
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError, join_errors

SLOTS = 2  # one bucket is on its way while the next is merged


@dataclass(frozen=True)
class Shipment:
    """The tensors for servers that need the same.

    header: what the announcement says beside names, dtypes and shapes. digests: take what is sent, as it is packed.
    """

    source: WeightSource
    header: Mapping[str, Any] = field(default_factory=dict)
    digests: Digests | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that each server is sent."""
        return bucket_bytes(self.source.metadata())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors, in order; each is computed when its turn comes."""
        return iter(self.source) if self.digests is None else noted(self.source, self.digests)


class FleetUpdate:
    """The servers of one sync that have not failed yet, the failures of the others, and where the time goes."""

    def __init__(self, sessions: Sequence[SyncSession]) -> None:
        self.fit = list(sessions)
        self.phases = SyncPhases()
        self._failures: list[ServerError] = []

    def guard(self, session: SyncSession, step: Callable[..., Any], *arguments: Any) -> None:
        """Run a step of one server; if it fails, give the server up for this round."""
        try:
            step(*arguments)
        except ServerError as error:
            self._failures.append(error)
            self.fit = [other for other in self.fit if other is not session]
            session.lose()

    def each(self, step: Callable[..., Any], *arguments: Any, of: Callable[[SyncSession], bool] | None = None) -> None:
        """Run a step on every fit server, or on those of which `of` is so, all at once."""
        chosen = [session for session in self.fit if of is None or of(session)]
        running = {session: in_background(step, session, *arguments) for session in chosen}
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
    device: the one that weights are on. transport: see `VllmSync.transport`. one_group: whether servers share a group
    over NCCL, for as long as all of them hold; then all are always pushed the same.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        *,
        token: str,
        timeout_s: float,
        device: torch.device,
        bucket_bytes: int,
        transport: SyncTransport = "auto",
        one_group: bool = False,
    ) -> None:
        shared = one_group_for(device, len(servers), requested=transport, timeout_s=timeout_s) if one_group else None
        self._shared = shared
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self.sessions = [
            SyncSession(
                ServerClient(address.base_url, token, timeout_s=timeout_s),
                transfer_for(
                    device,
                    address.group_port,
                    requested=transport,
                    token=token,
                    bucket_bytes=bucket_bytes,
                    timeout_s=timeout_s,
                    shared=None if shared is None else (shared, seat),
                ),
            )
            for seat, address in enumerate(servers)
        ]
        self._packer = Packer(device, self.sessions[0].transfer.staging)

    @property
    def transport(self) -> Transport:
        """What carries the weights."""
        return self.sessions[0].transfer.transport

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways that it chose by itself between the members of all groups; empty where it says none."""
        return tuple(dict.fromkeys(way for session in self.sessions for way in session.transfer.ways))

    @property
    def sent(self) -> int:
        """Bytes that went to all servers so far, as they were counted on their way out."""
        return sum(session.transfer.sent for session in self.sessions)

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The servers' base URLs, in order."""
        return tuple(session.client.base_url for session in self.sessions)

    def parted(self) -> bool:
        """Whether the group of all servers has ended since this was asked last; then each gets one of its own."""
        if self._shared is None or not self._shared.ended:
            return False
        self._shared = None
        for session in self.sessions:
            session.lose()
        return True

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
        with update.phases.measure("connect"):
            update.each(SyncSession.connect, of=lambda session: not session.connected)
        with update.phases.measure("begin"):
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

        meanwhile: what the learner does once all is packed, while it goes out and servers load it.
        """
        metas = shipment.source.metadata()
        plan = list(plan_buckets(metas, self._bucket_bytes))
        announcement, timeout_s = json.dumps({**to_wire(metas), **shipment.header}), self._timeout_s * (len(plan) + 1)
        deliveries = [Delivery(session, announcement, timeout_s) for session in sessions]
        try:
            self._pack(plan, shipment.tensors(), deliveries, update)
        finally:
            for delivery in deliveries:
                delivery.close()
        with update.phases.measure("load"):
            if meanwhile is not None:
                meanwhile()
        with update.phases.measure("send"):
            for delivery in deliveries:
                delivery.wait()
        with update.phases.measure("load"):
            for delivery in deliveries:
                update.guard(delivery.session, delivery.confirm, self._timeout_s)

    def _pack(
        self,
        plan: Sequence[Sequence[TensorMeta]],
        tensors: Iterator[tuple[str, torch.Tensor]],
        deliveries: Sequence[Delivery],
        update: FleetUpdate,
    ) -> None:
        """Pack bucket after bucket, each as soon as a slot is free, until no server is left that takes it."""
        pool = SlotPool(self._packer.slots(plan, SLOTS))
        for bucket in plan:
            with update.phases.measure("send"):
                slot = pool.take()
            if all(delivery.failure for delivery in deliveries):
                return
            with update.phases.measure("pack"):
                packed = self._packer.pack(bucket, tensors, slot)
            parcel = Parcel(bucket, packed, pool, slot, readers=len(deliveries))
            for delivery in deliveries:
                delivery.put(parcel)
