"""Full sync: merged weights for every server at once, streamed in buckets, or made by the server of what is streamed.

The first push to a server carries everything. Later ones carry the layers that can have changed since (`held`), unless
the server was restarted, reports another version, or failed in an update: then it gets everything again.

Where servers merge (`merge_place`), they are sent adapters and what else trains, and take the rest from their own model
folder. Wherever it is merged, they are compared with the learner by digests of all that they have loaded, before the
sync counts: the learner takes its own of what it sends as it is packed, and of what servers make while they make it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from stage2_api.vllm import ServerAddress, SyncMerge, VllmSync
from stage2_trainer.sync.fleet.fleet import Fleet, FleetUpdate, Shipment
from stage2_trainer.sync.fleet.held_versions import HeldVersions
from stage2_trainer.sync.fleet.sync_content import SyncContent, made_by_server
from stage2_trainer.sync.fleet.sync_report import SyncReport
from stage2_trainer.sync.fleet.sync_session import SyncSession
from stage2_trainer.sync.tensors.folder_proof import FolderProof
from stage2_trainer.sync.tensors.merge import WeightSource, merged_weights, touches_vision
from stage2_trainer.sync.tensors.merge_place import MergePlace, Objection, question
from stage2_trainer.sync.tensors.rounding import KeptUpdate, rounding_of
from stage2_trainer.sync.transports.buckets import DEFAULT_BUCKET_BYTES
from stage2_trainer.wire.background import all_at_once
from stage2_trainer.wire.errors import ServerError

logger = logging.getLogger(__name__)

BY_DEFAULT = VllmSync()


class FullSync:
    """A sync that brings every server to the merged weights of a model.

    servers, token, timeout_s, device, bucket_bytes: see `Fleet`.
    how: what carries weights, where adapters are merged, how merged weights are rounded, and whether a server that
    holds everything is sent only what can have changed since.
    adapted: whether adapters train; where nothing but the weights themselves do, many servers share a group.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        *,
        token: str,
        timeout_s: float,
        device: torch.device,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        how: VllmSync = BY_DEFAULT,
        adapted: bool = True,
    ) -> None:
        self.fleet = Fleet(
            servers,
            token=token,
            timeout_s=timeout_s,
            device=device,
            bucket_bytes=bucket_bytes,
            transport=how.transport,
            one_group=not adapted and len(servers) >= how.one_group_from,
        )
        self.place = MergePlace(how.merge)
        self._how = how

    @property
    def merge(self) -> SyncMerge:
        """Where adapters are merged."""
        return self.place.effective

    @property
    def merge_reason(self) -> str:
        """Why they are merged there."""
        return self.place.reason

    @property
    def transport(self) -> str:
        """What carries the weights."""
        return self.fleet.transport

    def choose_place(self, model: nn.Module) -> None:
        """Find out whether the servers can merge what trains, and say where it is done. They must be up.

        Raises:
            ConfigError: they cannot, and the configuration demands it.
            ServerError: a server does not answer.
        """
        source = merged_weights(model)
        self.place.require_adapters(source)
        if not self.place.at_server:
            self.place.tell()
        else:
            self.place.compare_folders(source)

            def compare(session: SyncSession) -> None:
                with contextlib.suppress(Objection):
                    self.place.compare_folder(session, source)

            all_at_once(compare, self.fleet.sessions)
            self.place.settle()

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give every server the model's merged weights, under `version`.

        Raises:
            ServerError: one or more servers do not hold the version. The others do. The next call tries again.
            ProofError: a server has loaded other weights than the learner's, and the learner merges, or must not.
        """
        while True:
            self.place.objections.clear()
            try:
                report = self._sync(model, version)
            except ServerError as error:
                parted = self.fleet.parted()
                if self.place.recover():
                    continue
                if not parted:
                    raise
                logger.warning("%s; each server has an NCCL group of its own from here on", error)
            else:
                self.fleet.parted()  # while it was formed, and nobody was held up
                return report

    def _sync(self, model: nn.Module, version: int) -> SyncReport:
        start, sent_before = time.monotonic(), self.fleet.sent
        kept = KeptUpdate()
        source = merged_weights(model, rounding=rounding_of(self._how.rounding, version), kept=kept)
        self.place.require_adapters(source)
        sent: list[Shipment] = []
        everything = False
        with self.fleet.update() as update:
            expected: dict[SyncSession, str] = {}
            for content, sessions in self._contents(source, update):
                shipment = content.shipment()
                self.fleet.push(shipment, sessions, update, meanwhile=content.note_made)
                expected |= dict.fromkeys(sessions, question(content.expected()))
                everything |= len(content.source.entries) == len(source.entries)
                sent.append(shipment)
            with update.phases.measure("finish"):
                moves_vision = {held: touches_vision(held.stale_names(source)) for held in held_by(update.fit)}
                update.each(self._finish, version, expected, moves_vision)
                now_held = HeldVersions.of(source)
                for session in update.fit:
                    session.held = now_held
        largest = max(sent, key=lambda shipment: shipment.nbytes)
        return SyncReport(
            version=version,
            seconds=time.monotonic() - start,
            bytes=largest.nbytes,
            tensors=len(largest.source.entries),
            servers=self.fleet.base_urls,
            everything=everything,
            wire_bytes=self.fleet.sent - sent_before,
            transport=self.fleet.transport,
            ways=self.fleet.ways,
            phases=update.phases.seconds(),
            merge=self.merge,
            merge_reason=self.merge_reason,
            rounding_kept=kept.share(),
        )

    def close(self) -> None:
        """Leave all groups."""
        self.fleet.close()

    def _contents(self, source: WeightSource, update: FleetUpdate) -> Iterator[tuple[SyncContent, list[SyncSession]]]:
        """Group the servers by what each must be brought."""
        if self.place.at_server:
            self.place.compare_folders(source)
            update.each(self.place.compare_folder, source, of=lambda session: session.folder is None)
        alike: dict[tuple[HeldVersions, FolderProof | None], list[SyncSession]] = {}
        for session in update.fit:
            alike.setdefault((session.held, session.folder if self.place.at_server else None), []).append(session)
        groups: dict[tuple[frozenset[str], frozenset[str]], list[SyncSession]] = {}
        for (held, folder), sessions in alike.items():
            names = held.stale_names(source) if self._how.changed_only else source.names()
            made = frozenset() if folder is None else made_by_server(source.only(names), folder)
            groups.setdefault((names, made), []).extend(sessions)
        for (names, made), sessions in groups.items():
            yield SyncContent(source.only(names), made), [session for session in sessions if session in update.fit]

    def _finish(
        self,
        session: SyncSession,
        version: int,
        expected: Mapping[SyncSession, str],
        moves_vision: Mapping[HeldVersions, bool],
    ) -> None:
        with self.place.judging():
            session.finish(version, vision_moved=moves_vision[session.held], expected=expected[session])
        session.holds_base = False
        session.drop_adapters()


def held_by(sessions: Iterable[SyncSession]) -> set[HeldVersions]:
    """Return what servers hold; those that were sent the same hold one and the same."""
    return {session.held for session in sessions}
