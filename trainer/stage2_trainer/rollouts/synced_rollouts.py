"""Fresh rollouts: the weights go to the servers if they moved, and the answers that come back are of just those."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from stage2_api.pod.progress import ReportedSync
from stage2_trainer.rollouts.chunks import contiguous_chunks
from stage2_trainer.rollouts.rollout_source import Chats, GenerationRequest, RolloutBatch
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.stopwatch import Stopwatch
from stage2_trainer.weights.sync_report import SyncReport
from stage2_trainer.weights.synchronizer import WeightSynchronizer
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.rollout import OnRollout, RolloutRequest, ServedBackend
from stage2_trainer.wire.seeds import SeedPlan

T = TypeVar("T")

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # a server that is restarted comes back empty: it gets the weights again, and the requests again


class SyncedRollouts:
    """A source of rollouts by the weights of the current optimizer step, which brings lost servers back into the run.

    `wait` returns when all servers are healthy, and raises ServerError when it has waited too long.
    """

    def __init__(
        self,
        backend: ServedBackend,
        synchronizer: WeightSynchronizer,
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
        self.sync_state = ReportedSync(requested_mode=synchronizer.requested, effective_mode=synchronizer.effective)

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Return one rollout for each chat, all made by the weights of the request's step.

        Raises ServerError when servers fail again and again: the run can go on later, from a checkpoint.
        """
        plan = self.plan(request.global_step, request.micro_step)

        def try_once() -> RolloutBatch:
            report = self._synced(request.model, request.global_step, request.stopwatch)
            with request.stopwatch.measure("rollout_generate"):
                answers = self.answers(request.chats, plan, version=request.global_step, on_rollout=request.on_rollout)
                return replace(answers, sync=report)

        return self._persistently(try_once, request.global_step)

    def sync(self, model: nn.Module, global_step: int, stopwatch: Stopwatch) -> SyncReport | None:
        """Give the servers the weights of `global_step`; None if they hold them. Raises ServerError as `generate`."""
        return self._persistently(lambda: self._synced(model, global_step, stopwatch), global_step)

    def plan(self, global_step: int, micro_step: int) -> SeedPlan:
        """Return the seeds of a micro-step's requests."""
        return SeedPlan(self._seed, global_step, micro_step)

    def answers(
        self,
        chats: Chats,
        plan: SeedPlan,
        *,
        version: int,
        on_rollout: OnRollout | None = None,
    ) -> RolloutBatch:
        """Return what the servers answer, without a sync and without another try. Raises ServerError."""
        requests = [RolloutRequest(messages=list(chat), adapter=self._synchronizer.adapter_name) for chat in chats]
        start, sync = time.monotonic(), self.sync_state
        rollouts = self._backend.generate(requests, seed_plan=plan, version=version, on_rollout=on_rollout)
        return RolloutBatch(rollouts, None, self._origin(plan, sync, len(requests), time.monotonic() - start))

    def _persistently(self, step: Callable[[], T], global_step: int) -> T:
        """Do something that servers are needed for, again when they were lost and have come back."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return step()
            except ServerError as error:
                if attempt == ATTEMPTS:
                    raise
                logger.warning("attempt %d of %d at step %d: %s", attempt, ATTEMPTS, global_step, error)
                self._synchronizer.invalidate()
                self._reporter.update(phase="waiting-for-servers", message=str(error))
                self._wait()

    def _synced(self, model: nn.Module, global_step: int, stopwatch: Stopwatch) -> SyncReport | None:
        self._reporter.update(phase="syncing")
        with stopwatch.measure("sync"):
            report = self._synchronizer.ensure_synced(model, global_step)
        if report is not None:
            pushed = self.sync_state.pushed(report.version, report.seconds, report.servers)
            self.sync_state = pushed.model_copy(update={"effective_mode": self._synchronizer.effective})
        self._reporter.update(phase="rollout", sync=self.sync_state, message="")
        return report

    def _origin(self, plan: SeedPlan, sync: ReportedSync, count: int, seconds: float) -> dict[str, Any]:
        """Return what the record says of every rollout of a micro-step."""
        urls = self._backend.base_urls
        return {
            "micro_step": plan.micro_step,
            "servers": list(urls),
            "sync": {
                "requested": sync.requested_mode,
                "effective": sync.effective_mode,
                "version": sync.version,
                "seconds": sync.seconds,
            },
            "seed_base": plan.base,
            "chunks": [
                {"server": server, "start": start, "end": end, "seed": plan.seed(start)}
                for server, (start, end) in enumerate(contiguous_chunks(count, len(urls)))
                if start < end
            ],
            "generate_s": seconds,
        }
