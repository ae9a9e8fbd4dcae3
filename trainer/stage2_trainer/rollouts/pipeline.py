"""Stale by choice: the next step's rollouts are made while the current one trains (`pipeline.enabled`).

A step begins with a sync, after everything that was asked of the servers is there; then all of the step after it is
asked for at once, with the seeds that it has anyway, and answered by these weights. When its turn comes, the learner is
one optimizer step further: no rollout is older than one sync. The first step of an epoch is made when it begins.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from stage2_api.pod.report import ReportedSync
from stage2_trainer.rollouts.rollout_source import GenerationRequest, PendingRollouts, RolloutBatch
from stage2_trainer.rollouts.synced_rollouts import SyncedRollouts
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.wire.errors import ServerError

logger = logging.getLogger(__name__)


class PipelinedRollouts:
    """Rollouts of training, asked for one step ahead. `direct`: those of an evaluation, of the newest weights."""

    def __init__(self, synced: SyncedRollouts) -> None:
        self._synced = synced
        self._thread = ThreadPoolExecutor(1, "rollouts-ahead")  # one after the other: their order is part of the run
        self._asked: list[PendingRollouts] = []
        self.direct = DirectRollouts(self)

    @property
    def sync_state(self) -> ReportedSync:
        """The last sync."""
        return self._synced.sync_state

    def synced(self, request: GenerationRequest) -> SyncReport | None:
        """Wait for all that was asked for, and give the servers the weights of the request's step.

        Raises:
            ServerError: servers were lost, and did not come back.
        """
        with request.stopwatch.measure("rollout_generate"):
            self.settle()
        return self._synced.sync(request.model, request.global_step, request.stopwatch)

    def ask(self, request: GenerationRequest, *, version: int) -> PendingRollouts:
        """Ask for a step's rollouts by the weights that the servers hold, of step `version`.

        Where servers are lost meanwhile, fresh rollouts are made instead, when they are waited for.
        """
        asked = PendingRollouts(
            self._thread.submit(self._synced.answers, request, version=version),
            lambda error: self._anew(request, error),
        )
        self._asked = [one for one in self._asked if not one.all_in] + [asked]
        return asked

    def settle(self) -> None:
        """Wait until nothing is asked of the servers any more: a sync would abort it."""
        for one in self._asked:
            one.settle()

    def begin_now(self, request: GenerationRequest) -> PendingRollouts:
        """Let rollouts be made by the weights as they are."""
        self.settle()
        return self._synced.begin(request)

    def close(self) -> None:
        """Ask for nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _anew(self, request: GenerationRequest, error: ServerError) -> PendingRollouts:
        logger.warning("rollouts ahead were lost, and are made again by the weights as they are: %s", error)
        return self.begin_now(request)


class DirectRollouts:
    """A source beside the pipeline: what was asked for ahead is waited for, and stays for its turn."""

    def __init__(self, pipeline: PipelinedRollouts) -> None:
        self._pipeline = pipeline

    @property
    def sync_state(self) -> ReportedSync:
        """The last sync."""
        return self._pipeline.sync_state

    def begin(self, request: GenerationRequest) -> PendingRollouts:
        """Let one rollout for each chat be made, all by the weights of the request's step."""
        return self._pipeline.begin_now(request)

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Begin it, and return all rollouts."""
        pending = self.begin(request)
        with request.stopwatch.measure("rollout_generate"):
            return pending.result()
