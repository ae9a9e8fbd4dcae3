"""A push of weights: from "the optimizer has stepped" to "every server answers with the new weights".

Read `WeightSync.ensure_synced`, then `FullPush._push_once`: their steps are the push, in order. `push_adapter` takes
the same steps with adapters alone.

Nested terms: a push is one update of all servers; a shipment is what servers with the same needs are sent; a delivery
takes it to one of them.

The first full push to a server carries everything. Later ones carry the layers that can have changed since, unless
`changed_only` is off, or the server was restarted, reports another version, or failed in an update: then it gets
everything again. Where servers merge, they are sent adapters and what else trains, and take the rest from their own
model folder.

A push that fails raises ServerError. Its caller, `ServerRollouts._push`, waits for the servers and pushes again, as
often as `fleet.retries` allows.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

import torch
from torch import nn

from stage2_api.vllm import ServerAddress, VllmSync
from stage2_trainer.process.background import all_at_once
from stage2_trainer.sync.fleet.delivery import SLOTS, Shipment
from stage2_trainer.sync.fleet.merge_location import MergeLocation, MergeMismatch
from stage2_trainer.sync.fleet.proof import Prover
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.sync.fleet.server import Fleet, ServerSession, Update
from stage2_trainer.sync.tensors.announcement import plan_buckets
from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge import (
    HERE,
    WeightAccess,
    WeightSource,
    held_after,
    merged_weights,
    stale_names,
    touches_vision,
)
from stage2_trainer.sync.tensors.merge_math import rounding_for
from stage2_trainer.wire.errors import ServerError

logger = logging.getLogger(__name__)

SyncMode = Literal["full", "adapter", "auto"]
EffectiveMode = Literal["full", "adapter"]
Shipments = list[tuple[Shipment, list[ServerSession]]]
"""What is sent, and to whom."""
ROUNDING_PATH = "custom.extra.rollout_matching.vllm.sync.rounding"
MOSTLY_LOST = 0.5  # of an update: below it the serving policy is nearer to the base than to the one that trains
BY_DEFAULT = VllmSync()

Push = Callable[..., SyncReport]
"""Brings servers up to date: takes the model, and by keyword the version. Raises ServerError."""


class WeightSync:
    """Pushes weights on demand, before fresh rollouts, and never twice for one optimizer step.

    requested: the mode of the configuration. adapter: how adapters are pushed; None = the run pushes full weights.
    fallback: whether an adapter that servers refuse turns the rest of the run to full pushes, or is an error.
    prover: proves that pushes worked; None = no proofs. planned: what is known before the first push.
    report: the last push.
    """

    def __init__(
        self,
        requested: SyncMode,
        *,
        full: Push,
        adapter: Push | None = None,
        fallback: bool = True,
        prover: Prover | None = None,
        planned: SyncReport | None = None,
    ) -> None:
        self._requested = requested
        self._full = full
        self._adapter = adapter
        self._fallback = fallback
        self._prover = prover
        self._synced_step: int | None = None
        self._warned_of_rounding = False
        self.report = self._completed(planned or SyncReport())

    @property
    def effective(self) -> EffectiveMode:
        """The mode in use."""
        return "full" if self._adapter is None else "adapter"

    def ensure_synced(self, model: nn.Module, global_step: int) -> SyncReport | None:
        """Push the weights, unless the last successful push was of `global_step`: then return None.

        No server is asked whether it still holds them; see `invalidate`. Requests must then ask for `report.adapter`.

        Raises:
            ServerError: the push, or a server's part in its proof, failed; the next call pushes again.
            ProofError: a server answers with other weights, although it took the push.
        """
        # 1. Do the servers hold the weights of this step?
        if self._synced_step == global_step:
            return None
        self._synced_step = None

        # 2. Push them: the adapter, or the merged weights where there is none or servers refuse it.
        pushed = self._push_in_mode(model, global_step)

        # 3. If a proof is due: do the servers answer as the learner does? A doubt is no error, and the push stands.
        prove_s = None
        if self._prover is not None:
            start = time.monotonic()
            self._prover.prove_push(model, step=global_step, adapter=pushed.adapter)
            prove_s = time.monotonic() - start
            pushed = pushed.model_copy(update={"proof_gap": self._prover.gap})

        # 4. Report it.
        pushed = pushed.model_copy(update={"pushes": self.report.pushes + 1})
        self.report = self._completed(pushed, prove_s)
        self._synced_step = global_step
        self._log(self.report)
        return self.report

    def invalidate(self) -> None:
        """Forget the last push, which servers may have lost: the next call pushes again, and proves it."""
        self._synced_step = None
        if self._prover is not None:
            self._prover.require_next()

    def _push_in_mode(self, model: nn.Module, version: int) -> SyncReport:
        """Push the adapter, or the merged weights where there is none or it is refused."""
        if self._adapter is not None:
            try:
                return self._adapter(model, version=version)
            except ServerError as error:
                # without a status the server is lost: the caller waits for it, and calls again
                if error.status is None or not self._fallback:
                    raise
                logger.warning("adapter sync failed, and the rest of the run uses full syncs: %s", error)
            self._adapter = None
            if self._prover is not None:
                self._prover.require_next()
        return self._full(model, version=version)

    def _completed(self, report: SyncReport, prove_s: float | None = None) -> SyncReport:
        return report.completed(requested=self._requested, effective=self.effective, prove_s=prove_s)

    def _log(self, report: SyncReport) -> None:
        logger.info("%s", report.summary())
        kept = report.rounding_kept
        if kept is not None and kept < MOSTLY_LOST and not self._warned_of_rounding:
            self._warned_of_rounding = True
            logger.warning(
                "at step %d servers have %.0f %% of the adapters' update: the rest is lost in the rounding of merged"
                " weights, and rollouts come from an older policy; set %s to stochastic, or watch sync/rounding_kept"
                " grow",
                report.version,
                100 * kept,
                ROUNDING_PATH,
            )


class FullPush:
    """Pushes the merged weights of a model to every server.

    servers, token, timeout_s, device: see `Fleet`.
    how: what carries weights, where adapters are merged, how merged weights are rounded, and whether a server that
    holds everything is sent only what can have changed since.
    adapted: whether adapters train; where only the weights themselves do, many servers share a group.
    access: how weights are read.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        *,
        token: str,
        timeout_s: float,
        device: torch.device,
        how: VllmSync = BY_DEFAULT,
        adapted: bool = True,
        access: WeightAccess = HERE,
    ) -> None:
        self.fleet = Fleet(
            servers,
            token=token,
            timeout_s=timeout_s,
            device=device,
            bucket_bytes=access.bucket_bytes,
            transport=how.transport,
            one_group=not adapted and len(servers) >= how.one_group_from,
        )
        self.location = MergeLocation(how.merge)
        self._how = how
        self._access = access

    def choose_location(self, model: nn.Module) -> None:
        """Find out once, before the first push, whether the servers can merge what trains. They must be up.

        Raises:
            ConfigError: they cannot, and the configuration demands it.
            ServerError: a server does not answer.
        """
        weights = merged_weights(model)
        self.location.merge_at_learner_without_adapters(weights)
        if self.location.at_server:
            self.location.digest_base(weights)

            def compare(session: ServerSession) -> None:
                with contextlib.suppress(MergeMismatch):  # noted in `location`, where `settle` decides
                    session.compare_folder(self.location, weights)

            all_at_once(compare, self.fleet.sessions)
        self.location.settle()

    def planned(self) -> SyncReport:
        """Return what is known before the first push."""
        merge, reason = self.location.effective, self.location.reason
        return SyncReport(transport=self.fleet.carrier, merge=merge, merge_reason=reason)

    def push(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give every server the model's merged weights, under `version`.

        A push that failed because a server cannot merge is repeated with merges at the learner; one that failed because
        the group of all servers ended, with a group for each. What servers hold is forgotten with their group, so that
        push sends everything.

        Raises:
            ServerError: one or more servers do not hold the version. The others do. The next call tries again.
            ProofError: a server has loaded other weights than the learner's, or cannot merge, and merging at the
                learner is no way out: it does so already, or `merge` is `server`.
        """
        while True:
            self.location.mismatches.clear()
            try:
                report = self._push_once(model, version)
            except ServerError as error:
                ended = self.fleet.leave_ended_group()
                if self.location.moved_to_learner():
                    continue  # the next push merges here
                if not ended:
                    raise
                logger.warning("%s; each server has an NCCL group of its own from here on", error)
            else:
                self.fleet.leave_ended_group()  # servers that could not form it had groups of their own in this push
                return report

    def close(self) -> None:
        """Leave all groups."""
        self.fleet.close()

    def _push_once(self, model: nn.Module, version: int) -> SyncReport:
        # 1. Take a snapshot of what servers must have. A tensor is merged when its bucket is packed, not before.
        rounding = rounding_for(self._how.rounding, version)
        weights = merged_weights(model, rounding=rounding, access=self._access)
        self.location.merge_at_learner_without_adapters(weights)

        # A server that fails in a step is given up for this push, and the others continue; the end of the block raises.
        with self.fleet.update() as update:
            # 2. Reach the servers: each has a group, reports the version that it took last, and stops generating.
            reach(update)

            # 3. Do their model folders have the learner's base weights? Only then can they merge.
            self._compare_folders(weights, update)

            # 4. What must each be sent, and what of that does it merge?
            shipments = self._shipments(weights, update)

            # 5. Send every bucket to every server.
            for shipment, sessions in shipments:
                send(self.fleet, shipment, sessions, update)

            # 6. A server that has loaded what was sent closes its update, drops its caches and resumes generation.
            #    One whose digests differ stays paused.
            with update.measure("finish"):
                self._finish(weights, version, shipments, update)

        # 7. All servers hold the version.
        largest = max((shipment for shipment, _ in shipments), key=lambda shipment: shipment.nbytes)
        return self.fleet.report(
            update,
            version,
            bytes=largest.nbytes,
            tensors=len(largest.metas),
            everything=any(shipment.names == weights.names() for shipment, _ in shipments),
            merge=self.location.effective,
            merge_reason=self.location.reason,
            rounding_kept=weights.rounding_kept(),
        )

    def _compare_folders(self, weights: WeightSource, update: Update) -> None:
        """Compare the model folders that were not compared since connecting, where servers are to merge."""
        if self.location.at_server:
            self.location.digest_base(weights)
            update.each(
                ServerSession.compare_folder, self.location, weights, only=lambda session: session.proven_base is None
            )

    def _shipments(self, weights: WeightSource, update: Update) -> Shipments:
        """Group the servers by what each needs."""

        alike: dict[tuple[frozenset[str], frozenset[str]], list[ServerSession]] = {}
        for session in update.fit:
            names = stale_names(session.held, weights) if self._how.changed_only else weights.names()
            merged_there: frozenset[str] = frozenset()
            if self.location.at_server and session.proven_base is not None:
                folder, entries = session.proven_base, weights.only(names).entries
                # the server has the weight below the adapter, and merges it itself
                merged_there = frozenset(e.name for e in entries if self.location.can_merge(folder, e))
            alike.setdefault((names, merged_there), []).append(session)
        digests = Digests()
        return [
            (Shipment.for_servers(weights.only(names), merged_there, digests), sessions)
            for (names, merged_there), sessions in alike.items()
        ]

    def _finish(self, weights: WeightSource, version: int, shipments: Shipments, update: Update) -> None:
        """Close the update of each server whose digests agree: caches are reset, generation resumes, old adapters go.

        A server whose digests differ stays paused until a later push.
        """
        requests: dict[ServerSession, str | None] = {}
        for shipment, sessions in shipments:
            requests |= dict.fromkeys(sessions, shipment.digest_request())
        held_now = held_after(weights)

        def finish(session: ServerSession) -> None:
            moved = touches_vision(stale_names(session.held, weights))
            with self.location.noting_mismatches():
                session.finish_full(version, held_now, vision_moved=moved, expected=requests[session])

        update.each(finish)


def reach(update: Update) -> None:
    """Connect to servers that have no group; all stop generating, and open an update.

    A server that reports another version than it took last was restarted: it is connected again, and gets everything.
    """
    with update.measure("connect"):
        update.each(ServerSession.connect, only=lambda session: not session.connected)
    with update.measure("begin"):
        update.each(ServerSession.begin)


def send(fleet: Fleet, shipment: Shipment, sessions: Sequence[ServerSession], update: Update) -> None:
    """Send every bucket to these servers at once, packing the next one while one is on its way."""
    plan = list(plan_buckets(shipment.metas, fleet.bucket_bytes))
    announcement, timeout_s = shipment.announcement, fleet.timeout_s * (len(plan) + 1)
    deliveries = [session.deliver(announcement, timeout_s) for session in sessions]
    slots, tensors = fleet.packer.slots(plan, SLOTS), shipment.tensors()
    sending: list[list[Future[None]]] = []
    for number, bucket in enumerate(plan):
        if number >= SLOTS:  # its slot is free once every server has been sent the bucket in it
            with update.measure("send"):
                for sent in sending[number - SLOTS]:
                    sent.result()
        if all(delivery.failure for delivery in deliveries):
            break
        with update.measure("pack"):
            packed = fleet.packer.pack(bucket, tensors, slots[number % SLOTS])
        sending.append([delivery.send(bucket, packed) for delivery in deliveries])
    with update.measure("load"):
        shipment.digest_what_servers_merge()  # while it goes out, and servers load it
    with update.measure("send"):
        for delivery in deliveries:
            delivery.wait()
    with update.measure("load"):
        for session, delivery in zip(sessions, deliveries, strict=True):
            update.guard(session, delivery.confirm, fleet.timeout_s)
