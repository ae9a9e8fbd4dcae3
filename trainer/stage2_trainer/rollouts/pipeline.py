"""Stale by choice: the next window's rollouts are made while the current one trains (`pipeline.enabled`).

A window begins with a sync, after everything that was asked of the servers is there; then the window after it is asked
for, in order, with the seeds that it has anyway, and answered by these weights. When its turn comes, the learner is one
optimizer step further: no rollout is older than one sync. The first window of an epoch is made when it begins.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from torch import nn

from stage2_api.pod.progress import ReportedSync
from stage2_trainer.rollouts.rollout_source import Chats, GenerationRequest, RolloutBatch
from stage2_trainer.rollouts.synced_rollouts import SyncedRollouts
from stage2_trainer.telemetry.stopwatch import Stopwatch
from stage2_trainer.weights.sync_report import SyncReport
from stage2_trainer.wire.errors import ServerError

logger = logging.getLogger(__name__)


class PipelinedRollouts:
    """Rollouts of training, asked for one window ahead. `direct`: those of an evaluation, of the newest weights."""

    def __init__(self, synced: SyncedRollouts) -> None:
        self._synced = synced
        self._thread = ThreadPoolExecutor(1, "rollouts-ahead")  # one after the other: their order is part of the run
        self._ahead: dict[tuple[int, int], Future[RolloutBatch]] = {}
        self._report: SyncReport | None = None
        self.direct = DirectRollouts(self)

    @property
    def sync_state(self) -> ReportedSync:
        """The last sync."""
        return self._synced.sync_state

    def look_ahead(
        self,
        model: nn.Module,
        window: Sequence[Chats],
        following: Sequence[Chats],
        *,
        global_step: int,
        stopwatch: Stopwatch,
    ) -> None:
        """Begin the window of `global_step`: sync, and ask for what follows it; both as chats of each micro-step.

        Raises:
            ServerError: servers were lost, and did not come back.
        """
        with stopwatch.measure("rollout_generate"):
            self.settle()
        self._report = self._synced.sync(model, global_step, stopwatch)
        for step, chats_of_window in ((global_step, window), (global_step + 1, following)):
            for micro_step, chats in enumerate(chats_of_window):
                if (step, micro_step) not in self._ahead:
                    plan = self._synced.plan(step, micro_step)
                    self._ahead[step, micro_step] = self._thread.submit(
                        self._synced.answers, chats, plan, version=global_step
                    )

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Return what was asked for ahead; where servers were lost meanwhile, fresh rollouts instead."""
        report, self._report = self._report, None
        try:
            with request.stopwatch.measure("rollout_generate"):
                return replace(self._ahead.pop((request.global_step, request.micro_step)).result(), sync=report)
        except ServerError as error:
            logger.warning("rollouts ahead were lost, and are made again by the weights as they are: %s", error)
        self.settle()
        return self._synced.generate(request)

    def settle(self) -> None:
        """Wait until nothing is asked of the servers any more: a sync would abort it."""
        wait(self._ahead.values())

    def generate_now(self, request: GenerationRequest) -> RolloutBatch:
        """Return rollouts of the weights as they are."""
        self.settle()
        return self._synced.generate(request)

    def close(self) -> None:
        """Ask for nothing more."""
        self._thread.shutdown(cancel_futures=True)


class DirectRollouts:
    """A source beside the pipeline: what was asked for ahead is waited for, and stays for its turn."""

    def __init__(self, pipeline: PipelinedRollouts) -> None:
        self._pipeline = pipeline

    @property
    def sync_state(self) -> ReportedSync:
        """The last sync."""
        return self._pipeline.sync_state

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Return one rollout for each chat, all made by the weights of the request's step."""
        return self._pipeline.generate_now(request)
