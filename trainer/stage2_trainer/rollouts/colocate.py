"""Rollouts by a vLLM engine inside the learner's own processes (`vllm.mode: colocate`).

The engine starts with the first rollouts and dummy weights: the first sync loads all of the learner's, each later one
the layers that can have changed since. Adapters are merged on the way. With tensor parallelism, neighbouring processes
form groups `[i * size, (i + 1) * size)`; every process of a group runs the same requests and keeps its own answers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, distributed, nn

from stage2_api.errors import ConfigError, refused
from stage2_api.vllm import SyncRounding
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.process.ranks import gathered, host_group
from stage2_trainer.rollouts.rollout_source import ask_in_parts
from stage2_trainer.sync.fleet.proof import Probe, Prover
from stage2_trainer.sync.fleet.report import ProofError, ProvedStep, SyncReport
from stage2_trainer.sync.tensors.merge import (
    Held,
    WeightSource,
    held_after,
    merged_weights,
    stale_names,
    touches_vision,
)
from stage2_trainer.sync.tensors.merge_math import rounding_for
from stage2_trainer.sync.vllm.vllm_compat import (
    LayerReload,
    before_each_step,
    drop_image_caches,
    free_shared_memory,
    planned_engine_words,
)
from stage2_trainer.wire.requests import (
    UNSYNCED,
    FinishReason,
    Outcome,
    Refused,
    Rollout,
    RolloutRequest,
    Sampling,
    SeedPlan,
)

logger = logging.getLogger(__name__)
ENGINE = "the colocated engine"
T = TypeVar("T")
SERVER = "colocate"  # where rollouts of this backend come from, in logs
STEPS_BETWEEN_MEETINGS = 8  # of an engine of several processes, which stop after the same token
DROPS_WEIGHTS = 2  # the sleep level after which an engine has no weights any more
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's tags of the memory that a sleep gives back


@dataclass(frozen=True)
class _Call:
    """One prompt of a call, the seed of its answer, and what is added to the logits of tokens."""

    messages: list[Any]
    seed: int
    bias: Mapping[int, float]


class ColocateEngine:
    """One vLLM engine, or this process's part of one.

    options: arguments of vLLM's `LLM`. environment: variables to set before vLLM is imported, unless they are set.
    sleep_level: vLLM's sleep level between rollouts; 0 = awake. infer_batch_size: most requests of one call.
    rounding: how merged weights are cast. `stops` returns whether to stop generating.
    """

    version = UNSYNCED
    """The version of the weights that the engine holds. Sleep of level 2 drops them."""

    def __init__(
        self,
        options: dict[str, Any],
        environment: dict[str, str],
        *,
        sampling: Sampling,
        prover: EngineProver,
        sleep_level: int = 0,
        infer_batch_size: int | None = None,
        rounding: SyncRounding = "nearest",
    ) -> None:
        self.stops: Callable[[], bool] = lambda: False
        self._steps = 0
        self._options = options
        self._environment = environment
        self._sampling = sampling
        self._prover = prover
        self._sleep_level = sleep_level
        self._batch_size = infer_batch_size
        self._rounding = rounding
        self._held: Held = {}
        self._asleep: list[str] = []
        self._llm: Any = None
        self._reload: LayerReload | None = None
        self._parallel: TensorParallel

    def words(self) -> str:
        """Return what will compute the answers. Raises vLLM's errors about its options."""
        self._set_environment()
        return planned_engine_words(self._options)

    def start(self) -> None:
        """Start vLLM, if it does not run yet, and put it to sleep until it is needed."""
        if self._llm is not None:
            return
        start = time.monotonic()
        self._set_environment()
        import vllm

        self._parallel = TensorParallel(self._options["tensor_parallel_size"])
        free_shared_memory(self._parallel.ranks)
        self._llm = vllm.LLM(**self._options)
        before_each_step(self._llm, self._stop_if_asked)
        logger.info("vLLM %s started in this process in %.0f s", vllm.__version__, time.monotonic() - start)
        self._sleep()

    def sync(self, model: nn.Module, *, version: int, make_room: Callable[[], object] = lambda: None) -> SyncReport:
        """Load the weights that can have changed since the last sync, and drop the engine's caches.

        The engine's weights are awake beside the learner's, its cache is not. make_room: moves the learner's away; it
        is called before the cache wakes, which a proof needs once the learner has computed its side.

        Raises:
            ProofError: the engine does not answer with these weights afterwards.
        """

        def answered(probe: Probe) -> Tensor:
            make_room()
            self._wake(CACHE)
            return self.prompt_logprobs(probe)

        start, self.version = time.monotonic(), UNSYNCED
        self._wake(WEIGHTS)
        source = merged_weights(model, rounding=rounding_for(self._rounding, version))
        stale = source.only(stale_names(self._held, source))
        self._load(stale)
        self._held = held_after(source)
        self._forget(vision=touches_vision(stale.names()))
        self._prover.after_sync(model, answered, step=version)
        self.version = version
        return SyncReport.create(
            version,
            time.monotonic() - start,
            [SERVER],
            bytes=sum(meta.nbytes for meta in stale.metadata()),
            tensors=len(stale.entries),
            everything=len(stale.entries) == len(source.entries),
            rounding_kept=source.rounding_kept(),
            proof_gap=self._prover.gap,
        )

    def generate(self, requests: Sequence[RolloutRequest], *, seed_plan: SeedPlan) -> list[Outcome]:
        """Return the outcome of each of this process's requests; the group answers those of all its members.

        Answers are marked with the `version` that the engine holds.

        Raises:
            Interrupted: the run was asked to stop; in all members of the group after the same step.
        """
        mine = [_Call(list(one.messages), seed_plan.seed(i), one.bias) for i, one in enumerate(requests)]
        everyone, own = self._parallel.together(mine)
        self._wake(WEIGHTS, CACHE)
        version = self.version
        answers: list[Any | Refused] = []
        with ACTIVITY.doing("generating", len(everyone), "answers") as doing:
            for part in self._calls(everyone):
                answers += self._generate_part(part)
                doing.advance(len(part))
        self._sleep()
        return [one if isinstance(one, Refused) else _rollout(one, version) for one in answers[own]]

    def prompt_logprobs(self, probe: Probe) -> Tensor:
        """Return the log-probability of each prompt token but the first, float32 on the CPU."""
        import vllm

        once = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (answer,) = self._llm.chat([list(probe.messages)], once, use_tqdm=False)
        if list(answer.prompt_token_ids) != (expected := probe.inputs["input_ids"][0].tolist()):
            raise ProofError(
                f"the engine reads a sample prompt as other ids: {answer.prompt_token_ids}, not {expected}"
            )
        scores = zip(answer.prompt_logprobs[1:], expected[1:], strict=True)
        return torch.tensor([position[token].logprob for position, token in scores])

    def _set_environment(self) -> None:
        """Set the variables that vLLM reads when it is imported."""
        for name, value in self._environment.items():
            os.environ.setdefault(name, value)

    def _calls(self, requests: list[Any]) -> list[list[Any]]:
        size = self._batch_size if self._batch_size and self._batch_size > 0 else max(len(requests), 1)
        return [requests[start : start + size] for start in range(0, len(requests), size)]

    def _generate_part(self, requests: Sequence[_Call]) -> list[Any | Refused]:
        """Return vLLM's answers, or its refusals; all members of the group send the same."""
        from vllm.exceptions import VLLMClientError

        return ask_in_parts(self._chat, requests, refuses=lambda error: isinstance(error, VLLMClientError))

    def _chat(self, requests: Sequence[_Call]) -> list[Any]:
        """Return vLLM's answer to each request."""
        import vllm

        fields: dict[str, Any] = dict(self._sampling.parameters())
        if (repetition := self._sampling.repetition) is not None:
            fields["repetition_detection"] = vllm.sampling_params.RepetitionDetectionParams(**asdict(repetition))
        sampling = [vllm.SamplingParams(**fields, seed=one.seed, logit_bias=dict(one.bias) or None) for one in requests]
        answers: list[Any] = self._llm.chat([one.messages for one in requests], sampling, use_tqdm=False)
        if len(answers) != len(requests):
            raise RuntimeError(f"{len(answers)} answers to {len(requests)} requests")
        return answers

    def _stop_if_asked(self) -> None:
        """Stop generating if the run was asked to stop; groups, which make the same steps, check every eighth."""
        self._steps += 1
        if self._parallel.size > 1 and self._steps % STEPS_BETWEEN_MEETINGS:
            return
        if any(self._parallel.together([self.stops()])[0]):
            raise Interrupted("asked to stop (SIGTERM)")

    def _load(self, source: WeightSource) -> None:
        def load(model: Any) -> None:
            self._reload = self._reload or LayerReload(model, self._llm.model_config)
            self._reload.load(iter(source))
            self._reload.require_whole()
            self._reload.finish()

        self._llm.apply_model(load)

    def _forget(self, *, vision: bool) -> None:
        """Drop what was computed with older weights.

        Raises:
            RuntimeError: the engine keeps its attention cache.
        """
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the colocated engine did not drop its prefix cache: it would answer with older weights")
        if vision:
            drop_image_caches(self._llm)

    def _sleep(self) -> None:
        if self._sleep_level and WEIGHTS not in self._asleep:
            self._llm.sleep(level=self._sleep_level)
            self._asleep = [WEIGHTS, CACHE]
            if self._sleep_level == DROPS_WEIGHTS:
                self._held, self.version = {}, UNSYNCED

    def _wake(self, *tags: str) -> None:
        """Take back the memory of these tags; vLLM ignores a call that names one which is awake.

        Raises:
            ConfigError: the GPU has no room for it.
        """
        for tag in [tag for tag in tags if tag in self._asleep]:
            try:
                self._llm.wake_up(tags=[tag])
            except RuntimeError as error:  # vLLM's allocator has no error class of its own
                if "out of memory" not in str(error).lower():
                    raise
                raise _without_room(tag, self._options, error) from error
            self._asleep.remove(tag)


def _without_room(tag: str, options: Mapping[str, Any], error: RuntimeError) -> ConfigError:
    """Return the error of an engine that cannot wake beside the learner."""
    vllm, offload = "custom.extra.rollout_matching.vllm", "custom.extra.rollout_matching.offload"
    if tag == WEIGHTS:
        path, option = f"{vllm}.tensor_parallel_size", "tensor_parallel_size"
        way_out = f"set {offload}.enabled and {offload}.offload_optimizer, or raise tensor_parallel_size"
    else:
        path, option = f"{vllm}.gpu_memory_utilization", "gpu_memory_utilization"
        way_out = f"lower it, or set {offload}.enabled, {offload}.offload_model and {offload}.offload_optimizer"
    rule = f"must leave room on the GPU for the engine's {tag} beside the learner ({error})"
    return refused(path, options.get(option), rule, f"{way_out}; `stage2 doctor` counts what both take")


def _rollout(answer: Any, version: int) -> Rollout:
    """Read one of vLLM's answers. Raises RuntimeError if its request failed or was aborted."""
    (choice,) = answer.outputs
    if choice.finish_reason not in get_args(FinishReason) or not answer.prompt_token_ids:
        raise RuntimeError(f"request {answer.request_id} ended with {choice.finish_reason!r} and no rollout")
    drafts = {} if choice.spec_decode_metrics is None else choice.spec_decode_metrics.to_dict()
    return Rollout(
        prompt_token_ids=list(answer.prompt_token_ids),
        token_ids=list(choice.token_ids),
        text=choice.text,
        server=SERVER,
        version=version,
        finish_reason=choice.finish_reason,
        drafted=drafts.get("num_draft_tokens", 0),
        accepted=drafts.get("num_accepted_draft_tokens", 0),
        verified=tuple(drafts.get("acceptance_histogram", ())),
    )


class EngineProver:
    """Proves the syncs of this process's engine, by log-probabilities of a prompt against the learner's.

    All processes prove together, whatever their own results. every, tolerance, proved: see `Prover`.
    """

    def __init__(
        self, probe: Probe, *, every: int, tolerance: float | None = None, proved: ProvedStep | None = None
    ) -> None:
        self._proved = proved or ProvedStep()
        self._own = ProvedStep()  # of this process's engine; there may be others
        self._schedule = Prover(probe, every=every, tolerance=tolerance, proved=self._own)
        self._group = host_group()

    @property
    def gap(self) -> float | None:
        """The mean difference of the last proof; None before the first one."""
        return self._schedule.gap

    def after_sync(self, model: nn.Module, logprobs: Callable[[Probe], Tensor], *, step: int) -> None:
        """Prove this step's sync if it is due. All processes must call it; a step is proved by all.

        Raises:
            ProofError: an engine holds other weights than the learner; in all processes.
            Interrupted: the run was asked to stop; in the processes that noticed it here.
        """
        contradiction, interrupted = "", None
        try:
            ask = {ENGINE: lambda: logprobs(self._schedule.probe)}
            # One attempt: the processes of a tensor-parallel engine call it together, so equally often.
            self._schedule.prove(model, lambda: ask, step=step, attempts=1)
        except ProofError as error:
            contradiction = str(error)
        except Interrupted as error:
            interrupted = error
        everyone = gathered((contradiction, self._own.step == step), self._group)
        for rank, (found, _) in enumerate(everyone):
            if found:
                raise ProofError(found if len(everyone) == 1 else f"learner process {rank}: {found}")
        if interrupted is not None:
            raise interrupted
        if all(proved for _, proved in everyone):
            self._proved.step = step
        elif any(proved for _, proved in everyone):
            self._schedule.require_next()  # as the processes do whose engine is in doubt


class TensorParallel:
    """This process's tensor-parallel group, a part of the default process group."""

    def __init__(self, size: int) -> None:
        initialized = distributed.is_initialized()
        world, rank = (distributed.get_world_size(), distributed.get_rank()) if initialized else (1, 0)
        self.size = size
        self.place = rank % size
        self.ranks = range(rank - self.place, rank - self.place + size)
        self._group: distributed.ProcessGroup | None = None
        for ranks in groups(world, size):
            if size > 1:  # every process takes part in forming every group
                group = distributed.new_group(ranks, backend="gloo")
                self._group = group if rank in ranks else self._group

    def together(self, items: Sequence[T]) -> tuple[list[T], slice]:
        """Return the items of all members in rank order, and where this one's own lie. All members must call it."""
        if self._group is None:
            return list(items), slice(0, len(items))
        found: list[list[T]] = [[] for _ in range(self.size)]
        distributed.all_gather_object(found, list(items), group=self._group)
        return [item for part in found for item in part], own_slice([len(part) for part in found], self.place)


def groups(world_size: int, size: int) -> list[list[int]]:
    """Return the ranks of every group.

    >>> groups(4, 2)
    [[0, 1], [2, 3]]
    """
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def own_slice(counts: Sequence[int], place: int) -> slice:
    """Return where a member's own items lie in the list of all members' items.

    >>> own_slice([2, 0, 3], 2)
    slice(2, 5, None)
    """
    start = sum(counts[:place])
    return slice(start, start + counts[place])
