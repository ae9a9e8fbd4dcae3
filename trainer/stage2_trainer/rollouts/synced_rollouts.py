"""Fresh rollouts: the weights go to the servers if they moved, and the answers that come back are of just those."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from stage2_trainer.data.lazy import LazySequence
from stage2_trainer.rollouts.rollout_source import GenerationRequest, PendingRollouts, RolloutBatch, contiguous_chunks
from stage2_trainer.sync.fleet.push import WeightSync
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, SeedPlan, ServedBackend

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # a server that is restarted comes back empty: it gets the weights again, and the requests again


class SyncedRollouts:
    """A source of rollouts by the weights of the current optimizer step, which brings lost servers back into the run.

    `wait` returns when all servers are healthy, and raises ServerError when it has waited too long.
    """

    def __init__(
        self,
        backend: ServedBackend,
        synchronizer: WeightSync,
        *,
        seed: int,
        wait: Callable[[], None],
        reporter: Reporter,
    ) -> None:
        self._backend = backend
        self._synchronizer = synchronizer
        self._seed = seed
        self._wait = wait
        self._reporter = reporter

    @property
    def sync_state(self) -> SyncReport:
        """The last weight sync; before the first, what is known of it."""
        return self._synchronizer.report

    def begin(self, request: GenerationRequest) -> PendingRollouts:
        """Let one rollout for each chat be made, all by the weights of the request's step.

        Raises ServerError, as what it returns does, when servers fail again and again: the run can go on later, from a
        checkpoint.
        """
        return _Attempts(self, request).begin()

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Begin it, and return all rollouts. Raises ServerError as `begin`."""
        pending = self.begin(request)
        with request.stopwatch.measure("rollout_generate"):
            return pending.result()

    def sync(self, model: nn.Module, global_step: int, stopwatch: Stopwatch) -> SyncReport | None:
        """Give the servers the weights of `global_step`; None if they hold them. Raises ServerError as `begin`."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return self.synced(model, global_step, stopwatch)
            except ServerError as error:
                self.lost(error, attempt, global_step)

    def lost(self, error: ServerError, attempt: int, global_step: int) -> None:
        """Wait for servers that were lost; raise the error when they were lost too often."""
        if attempt == ATTEMPTS:
            raise error
        logger.warning("attempt %d of %d at step %d: %s", attempt, ATTEMPTS, global_step, error)
        self._synchronizer.invalidate()
        self._reporter.update(phase="waiting-for-servers", message=str(error))
        self._wait()

    def answers(self, request: GenerationRequest, *, version: int, sync: SyncReport | None = None) -> RolloutBatch:
        """Return what the servers answer, without a sync and without another try. Raises ServerError."""
        plan, adapter, chats = request.seeds(self._seed), self.sync_state.adapter, request.chats
        # built one by one: images are in memory only while they travel
        asked = LazySequence(
            len(chats), lambda index: RolloutRequest(list(chats[index]), adapter=adapter, further=request.further)
        )
        start, state = time.monotonic(), self.sync_state
        rollouts = self._backend.generate(asked, seed_plan=plan, version=version, on_rollout=request.on_rollout)
        seconds = time.monotonic() - start
        return RolloutBatch(rollouts, sync, plan, self._origin(plan, state, len(asked), seconds))

    def synced(self, model: nn.Module, global_step: int, stopwatch: Stopwatch) -> SyncReport | None:
        """Give the servers the weights, without another try."""
        self._reporter.update(phase="syncing")
        with stopwatch.measure("sync"):
            report = self._synchronizer.ensure_synced(model, global_step)
        self._reporter.update(phase="rollout", sync=self.sync_state, message="")
        return report

    def _origin(self, plan: SeedPlan, sync: SyncReport, count: int, seconds: float) -> dict[str, Any]:
        """Return what the record says of every rollout of a request."""
        urls = self._backend.base_urls
        return {
            "servers": list(urls),
            "sync": sync.record(),
            "chunks": [
                {"server": server, "start": start, "end": end, "seed": plan.seed(start)}
                for server, (start, end) in enumerate(contiguous_chunks(count, len(urls)))
                if start < end
            ],
            "generate_s": seconds,
        }


class _Attempts:
    """The tries of one request: each begins with a sync where weights moved or were lost."""

    def __init__(self, rollouts: SyncedRollouts, request: GenerationRequest) -> None:
        self._rollouts = rollouts
        self._request = request
        self._attempt = 0

    def begin(self) -> PendingRollouts:
        request = self._request
        while True:
            self._attempt += 1
            try:
                report = self._rollouts.synced(request.model, request.global_step, request.stopwatch)
            except ServerError as error:
                self._lost(error)
                continue
            asked = in_background(self._rollouts.answers, request, version=request.global_step, sync=report)
            return PendingRollouts(asked, self._again)

    def _again(self, error: ServerError) -> PendingRollouts:
        self._lost(error)
        return self.begin()

    def _lost(self, error: ServerError) -> None:
        self._rollouts.lost(error, self._attempt, self._request.global_step)
