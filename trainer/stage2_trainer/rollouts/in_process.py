"""Rollouts in the learner's own processes: by its own model (hf), or by an engine beside it (colocate)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import cache

from torch import nn

from stage2_api.errors import ConfigError
from stage2_api.pod.report import SyncStatus
from stage2_trainer.model.gathered_weights import GatherWeights
from stage2_trainer.model.offload import StateOffloader
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.interrupt import Interrupt, Interrupted
from stage2_trainer.process.ranks import gathered, rank
from stage2_trainer.rollouts.colocate import ColocateEngine
from stage2_trainer.rollouts.hf import HfBackend
from stage2_trainer.rollouts.rollout_source import (
    Answers,
    GenerationRequest,
    LazySequence,
    RolloutBatch,
    RolloutSource,
    readable,
    require_version,
)
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.wire.requests import Outcome, Refused, RolloutRequest, SeedPlan

logger = logging.getLogger(__name__)

BACKEND_PATH = "custom.extra.rollout_matching.rollout_backend"
STAND_IN = RolloutRequest([{"role": "user", "content": "Answer with one word."}])
OWN = "own"  # the sync mode where the model that trains also generates


class EngineError(RuntimeError):
    """A colocated engine failed. Only a person can choose another source of rollouts."""

    def __init__(self, doing: str, cause: BaseException) -> None:
        super().__init__(
            f"vLLM failed while {doing}: {type(cause).__name__}: {cause}; lower vllm.gpu_memory_utilization, "
            f"vllm.infer_batch_size or vllm.max_num_seqs where memory is short, or set {BACKEND_PATH}: hf to make "
            "rollouts without vLLM"
        )


class HfRollouts(RolloutSource):
    """Rollouts by the model that trains: its weights are always the newest.

    interrupt: the backend checks it between tokens; a request to stop then reaches all processes here.
    """

    def __init__(self, backend: HfBackend, *, seed: int, reporter: Reporter, interrupt: Interrupt) -> None:
        self._backend = backend
        self._interrupt = interrupt
        self._seed = seed
        self._reporter = reporter
        self.sync_state = SyncStatus(requested_mode=OWN, effective_mode=OWN)

    def ask(self, request: GenerationRequest) -> Answers:
        """Generate one rollout for each chat, by the weights as they are; all are there when it returns.

        Raises:
            Interrupted: some process was asked to stop; in all processes.
        """
        self.sync_state = self.sync_state.model_copy(update={"version": request.global_step})
        self._reporter.update(phase="rollout", sync=self.sync_state)
        asked = _Requests.from_request(request, self._seed)
        with request.stopwatch.measure("rollout_generate"):
            rollouts = self._backend.generate(asked.requests, seed_plan=asked.plan, version=request.global_step)
        self._interrupt.check()
        return Answers.complete(RolloutBatch(asked.outcomes(rollouts), None, asked.plan))


class ColocateRollouts(RolloutSource):
    """Rollouts by an engine in this process, which gets the weights of a step unless it holds them.

    `ask` moves the optimizer state off the device, pushes the weights, moves the model off, proves the push if that is
    due, generates, and moves both back. The engine starts with the first rollouts. whole: gathers weights that ZeRO-3
    spreads over processes, for a `with` block. interrupt: the engine checks it between tokens; a request to stop then
    reaches all processes here.
    """

    def __init__(
        self,
        engine: ColocateEngine,
        offload: StateOffloader,
        *,
        sync_mode: str,
        seed: int,
        reporter: Reporter,
        interrupt: Interrupt,
        whole: GatherWeights | None = None,
    ) -> None:
        self._engine = engine
        self._interrupt = interrupt
        self._offload = offload
        self._whole: GatherWeights = whole or (lambda model: nullcontext())
        self._seed = seed
        self._reporter = reporter
        self._started = False
        self.sync_state: SyncStatus = SyncReport(requested_mode=sync_mode)

    def describe_engine(self) -> None:
        """Set `engines`. Raises EngineError if vLLM refuses its options."""
        try:
            self.engines = [self._engine.words()]
        except Exception as error:
            raise EngineError("reading its options", error) from error
        logger.info("the engine computes with %s", self.engines[0])

    def ask(self, request: GenerationRequest) -> Answers:
        """Sync, and generate one rollout for each chat; all are there when it returns.

        Raises:
            EngineError: vLLM failed; the message names the switch to hf.
            VersionError: the answers come from other weights than those of the step.
            Interrupted: some process was asked to stop; in all processes.
        """
        batch: RolloutBatch | None = None
        asked = _Requests.from_request(request, self._seed)
        with self._offload.without_optimizer():
            with self._interrupt.stoppable(nothing_to_save=not self._started):
                self._start(request.model)
            with suppress(Interrupted):  # of this process; others may have finished their answers
                batch = self._generate(request, asked)
        self._interrupt.check()
        assert batch is not None, "only an interrupted process ends early"
        return Answers.complete(batch)

    def _generate(self, request: GenerationRequest, asked: _Requests) -> RolloutBatch:
        model, step = request.model, request.global_step
        self._reporter.update(phase="syncing")
        with ExitStack() as away:
            make_room = cache(lambda: away.enter_context(self._offload.without_model(model)))
            with ACTIVITY.doing(f"loading the weights of step {step} into vLLM"), request.stopwatch.measure("sync"):
                report = self._sync(model, step, make_room)
            self._reporter.update(phase="rollout", sync=self.sync_state)
            with request.stopwatch.measure("rollout_generate"):
                make_room()
                outcomes = asked.outcomes(self._outcomes(asked))
                away.close()
        require_version(outcomes, step)
        return RolloutBatch(outcomes, report, asked.plan)

    def _start(self, model: nn.Module) -> None:
        if self._started:
            return
        with self._offload.without_model(model):
            try:
                with ACTIVITY.doing("starting vLLM in this process"):
                    self._engine.start()
            except Exception as error:
                raise EngineError("starting", error) from error
        self._started = True

    def _sync(self, model: nn.Module, global_step: int, make_room: Callable[[], None]) -> SyncReport | None:
        if self._engine.version == global_step:
            return None
        with self._whole(model):
            report = self._engine.sync(model, version=global_step, make_room=make_room)
        report = report.completed(requested=self.sync_state.requested_mode, effective="full")
        self.sync_state = report
        text = "the engine loaded the weights of step %d: %d tensors in %.2f s"
        logger.info(text, global_step, report.tensors, report.seconds)
        return report

    def _outcomes(self, asked: _Requests) -> Sequence[Outcome]:
        try:
            return self._engine.generate(asked.requests, seed_plan=asked.plan)
        except ConfigError:
            raise
        except Exception as error:
            raise EngineError("generating", error) from error


@dataclass(frozen=True)
class _Requests:
    """This process's requests, with seeds that no other process uses in their micro-steps.

    refused: the requests at fault, by their places. A stand-in replaces each, so that nothing changes for the others,
    and all processes of an engine send equally many.
    """

    requests: list[RolloutRequest]
    plan: SeedPlan
    refused: Mapping[int, Refused]

    @classmethod
    def from_request(cls, request: GenerationRequest, seed: int) -> _Requests:
        sizes = request.sizes or (len(request.chats),)
        before = [sum(column) for column in zip(*([0] * len(sizes), *gathered(sizes)[: rank()]), strict=True)]
        images: Sequence[tuple[str, ...] | None] = request.images or [None] * len(request.chats)
        built = LazySequence(
            len(request.chats),
            lambda i: RolloutRequest(list(request.chats[i]), images=images[i], bias=request.bias),
        )
        checked = [readable(built, index) for index in range(len(built))]
        return cls(
            [STAND_IN if isinstance(one, Refused) else one for one in checked],
            request.seeds(seed, before),
            {index: one for index, one in enumerate(checked) if isinstance(one, Refused)},
        )

    def outcomes(self, found: Sequence[Outcome]) -> list[Outcome]:
        return [self.refused.get(index, outcome) for index, outcome in enumerate(found)]
