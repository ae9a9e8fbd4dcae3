"""Rollouts from servers: weights are pushed when they moved, and the answers come from exactly those weights.

With a pipeline (`pipeline.enabled`) the next step is asked for while the current one trains. The next sync waits for
all requests under way, for it would abort them; so no rollout is older than one sync.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from stage2_trainer.data.lazy import LazySequence
from stage2_trainer.rollouts.rollout_source import (
    Answers,
    GenerationRequest,
    RolloutBatch,
    RolloutSource,
    contiguous_chunks,
)
from stage2_trainer.sync.fleet.push import WeightSync
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, SeedPlan, ServedBackend

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # a restarted server comes back empty: it gets the weights again, and the requests again


class ServerRollouts(RolloutSource):
    """Rollouts from servers; lost servers are waited for and brought back into the run.

    `wait` returns when all servers are healthy, and raises ServerError after a time-out.
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
        self._version = -1
        self._asked: list[Answers] = []
        self.sync_state: SyncReport = synchronizer.report

    def sync(self, request: GenerationRequest) -> SyncReport | None:
        """Wait for requests under way, then push the weights of the request's step; None if the servers hold them.

        Raises:
            ServerError: servers fail again and again; the run can resume later, from a checkpoint.
        """
        with request.stopwatch.measure("rollout_generate"):
            self._settle()
        self._asked.clear()
        return self._push(request)

    def ask(self, request: GenerationRequest) -> Answers:
        """Request one rollout for each chat, after the requests before it. Raises ServerError as `sync`.

        A request that was sent one step ahead and lost is sent again, to be answered by the weights of its own step.
        """
        version = self._version

        def ask(error: ServerError | None, tries: int) -> Future[RolloutBatch]:
            nonlocal version
            if error is None:
                return in_background(self._answer, request, version, None, tuple(self._asked))
            if version == request.global_step:
                self._wait_for_lost(error, tries, request.global_step)
            else:
                logger.warning("rollouts ahead were lost, and are made again by the weights as they are: %s", error)
            self._settle()
            report = self._push(request)
            version = request.global_step
            return in_background(self._answer, request, version, report, ())

        answers = Answers(ask)
        self._asked.append(answers)
        return answers

    def _settle(self) -> None:
        for answers in self._asked:
            answers.settle()

    def _push(self, request: GenerationRequest) -> SyncReport | None:
        for attempt in itertools.count(1):
            try:
                return self._push_once(request)
            except ServerError as error:
                self._wait_for_lost(error, attempt, request.global_step)
        raise AssertionError("it returns or raises")

    def _push_once(self, request: GenerationRequest) -> SyncReport | None:
        self._reporter.update(phase="syncing")
        with request.stopwatch.measure("sync"):
            report = self._synchronizer.ensure_synced(request.model, request.global_step)
        self.sync_state = self._synchronizer.report
        self._version = request.global_step
        self._reporter.update(phase="rollout", sync=self.sync_state, message="")
        return report

    def _wait_for_lost(self, error: ServerError, attempt: int, global_step: int) -> None:
        """Wait for lost servers; raise the error after the last attempt."""
        if attempt == ATTEMPTS:
            raise error
        logger.warning("attempt %d of %d at step %d: %s", attempt, ATTEMPTS, global_step, error)
        self._synchronizer.invalidate()
        self._reporter.update(phase="waiting-for-servers", message=str(error))
        self._wait()

    def _answer(
        self, request: GenerationRequest, version: int, sync: SyncReport | None, after: Sequence[Answers]
    ) -> RolloutBatch:
        """Return the servers' answers; runs in a thread of its own, when the requests before it are done."""
        for earlier in after:
            earlier.settle()
        plan, adapter, chats = request.seeds(self._seed), self.sync_state.adapter, request.chats
        # built one by one: images are in memory only while they travel
        requests = LazySequence(
            len(chats), lambda index: RolloutRequest(list(chats[index]), adapter=adapter, further=request.further)
        )
        start, state = time.monotonic(), self.sync_state
        rollouts = self._backend.generate(requests, seed_plan=plan, version=version, on_rollout=request.on_rollout)
        seconds = time.monotonic() - start
        return RolloutBatch(rollouts, sync, plan, self._origin(plan, state, len(requests), seconds))

    def _origin(self, plan: SeedPlan, sync: SyncReport, count: int, seconds: float) -> dict[str, Any]:
        """Return the record of a request: the same for each of its rollouts."""
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
