"""Full sync: the learner's merged weights, streamed in buckets to every server at once.

The first push to a server carries everything. Later ones carry the layers that can have changed since (`held`), unless
the server was restarted, reports another version, or failed in an update: then it gets everything again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from stage2_api.vllm import ServerAddress, SyncTransport
from stage2_trainer.weights.fleet import Fleet, FleetUpdate, Shipment
from stage2_trainer.weights.merge import WeightSource, merged_weights, touches_vision
from stage2_trainer.weights.sync_report import SyncReport
from stage2_trainer.weights.sync_session import SyncSession
from stage2_trainer.wire.buckets import DEFAULT_BUCKET_BYTES


class FullSync:
    """A sync that brings every server to the merged weights of a model.

    servers, token, timeout_s, device, bucket_bytes, transport: see `Fleet`.
    changed_only: whether a server that holds everything is sent only what can have changed since.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        *,
        token: str,
        timeout_s: float,
        device: torch.device,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        changed_only: bool = True,
        transport: SyncTransport = "auto",
    ) -> None:
        self.fleet = Fleet(
            servers,
            token=token,
            timeout_s=timeout_s,
            device=device,
            bucket_bytes=bucket_bytes,
            transport=transport,
        )
        self._changed_only = changed_only

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give every server the model's merged weights, under `version`.

        Raises:
            ServerError: one or more servers do not hold the version. The others do. The next call tries again.
        """
        start = time.monotonic()
        source = merged_weights(model)
        sent: list[Shipment] = []
        with self.fleet.update() as update:
            for shipment, sessions in self._shipments(source, update):
                self.fleet.push(shipment, sessions, update)
                sent.append(shipment)
            with update.phases.measure("finish"):
                update.each(_finish, version, source)
        largest = max(sent, key=lambda shipment: shipment.nbytes)
        return SyncReport(
            version=version,
            seconds=time.monotonic() - start,
            bytes=largest.nbytes,
            tensors=len(largest.source.entries),
            servers=self.fleet.base_urls,
            everything=len(largest.source.entries) == len(source.entries),
            transport=self.fleet.transport,
            phases=update.phases.seconds(),
        )

    def close(self) -> None:
        """Leave all groups."""
        self.fleet.close()

    def _shipments(self, source: WeightSource, update: FleetUpdate) -> Iterator[tuple[Shipment, list[SyncSession]]]:
        """Group the servers by what each must be sent."""
        groups: dict[frozenset[str], list[SyncSession]] = {}
        for session in update.fit:
            names = session.held.stale_names(source) if self._changed_only else source.names()
            groups.setdefault(names, []).append(session)
        for names, sessions in groups.items():
            yield Shipment(source.only(names)), [session for session in sessions if session in update.fit]


def _finish(session: SyncSession, version: int, source: WeightSource) -> None:
    session.finish(version, vision_moved=touches_vision(session.held.stale_names(source)))
    session.held.record(source)
    session.holds_base = False
    session.drop_adapters()
