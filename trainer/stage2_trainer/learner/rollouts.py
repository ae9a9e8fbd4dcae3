"""Fresh rollouts: the weights go to the servers if they moved, and the answers that come back are of just those."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from stage2_trainer.learner.metrics import Stopwatch
from stage2_trainer.learner.progress import Reporter, Sync
from stage2_trainer.rollout.backend import OnRollout, Rollout, RolloutRequest, ServedBackend
from stage2_trainer.rollout.chunks import contiguous_chunks
from stage2_trainer.rollout.seeds import SeedPlan
from stage2_trainer.server.errors import ServerError
from stage2_trainer.sync.policy import SyncPolicy
from stage2_trainer.sync.report import SyncReport

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # a server that is restarted comes back empty: it gets the weights again, and the requests again


@dataclass(frozen=True)
class FreshBatch:
    """Rollouts in request order, and the sync that came before them (None when the weights had not moved).

    origin: how they came to be, for the record: servers, sync, chunk plan, seeds, seconds.
    """

    rollouts: list[Rollout]
    sync: SyncReport | None
    origin: Mapping[str, Any] = field(default_factory=dict)


class FreshRollouts:
    """Generates with the weights of the current optimizer step, and brings lost servers back into the run.

    `wait` returns when all servers are healthy, and raises ServerError when it has waited too long.
    """

    def __init__(
        self, backend: ServedBackend, policy: SyncPolicy, *, seed: int, wait: Callable[[], None], reporter: Reporter
    ) -> None:
        self._backend = backend
        self._policy = policy
        self._seed = seed
        self._wait = wait
        self._reporter = reporter
        self.sync_state = Sync(policy.requested, policy.effective)

    def generate(
        self,
        model: nn.Module,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        *,
        global_step: int,
        micro_step: int,
        stopwatch: Stopwatch,
        on_rollout: OnRollout | None = None,
    ) -> FreshBatch:
        """Return one rollout for each chat, all made by the weights of `global_step`.

        Raises ServerError when servers fail again and again: the run can go on later, from a checkpoint.
        """
        requests = [RolloutRequest(messages=list(chat)) for chat in chats]
        plan = SeedPlan(self._seed, global_step, micro_step)
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._generate(model, requests, plan, stopwatch, on_rollout)
            except ServerError as error:
                if attempt == ATTEMPTS:
                    raise
                logger.warning("attempt %d of %d at step %d: %s", attempt, ATTEMPTS, global_step, error)
                self._policy.invalidate()
                self._reporter.update(phase="waiting-for-servers", message=str(error))
                self._wait()

    def _generate(
        self,
        model: nn.Module,
        requests: Sequence[RolloutRequest],
        plan: SeedPlan,
        stopwatch: Stopwatch,
        on_rollout: OnRollout | None,
    ) -> FreshBatch:
        self._reporter.update(phase="syncing")
        with stopwatch.measure("sync"):
            report = self._policy.ensure_synced(model, plan.global_step)
        if report is not None:
            self.sync_state = replace(self.sync_state.after(report), effective_mode=self._policy.effective)
        self._reporter.update(phase="rollout", sync=self.sync_state, message="")
        with stopwatch.measure("rollout_generate"):
            named = [replace(request, adapter=self._policy.adapter_name) for request in requests]
            start = time.monotonic()
            rollouts = self._backend.generate(named, seed_plan=plan, version=plan.global_step, on_rollout=on_rollout)
        return FreshBatch(rollouts, report, self._origin(plan, len(requests), time.monotonic() - start))

    def _origin(self, plan: SeedPlan, count: int, seconds: float) -> dict[str, Any]:
        """Return what the record says of every rollout of a micro-step."""
        urls, sync = self._backend.base_urls, self.sync_state
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
