"""Rollouts by a vLLM engine inside the learner's own processes (`vllm.mode: colocate`).

The engine starts with the first rollouts, with weights that mean nothing: the first sync gives it all of the learner's,
each later one the layers that can have changed since. Adapters are merged on the way (`sync.weights`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, get_args

import torch
from torch import Tensor, nn

from stage2_api.vllm import SyncRounding
from stage2_trainer.engine.vllm_compat import (
    before_each_step,
    drop_image_caches,
    finish_layerwise_reload,
    free_shared_memory,
)
from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.rollouts.asked_in_parts import asked_in_parts
from stage2_trainer.rollouts.colocate_groups import TensorParallel
from stage2_trainer.rollouts.colocate_proofs import EngineProver
from stage2_trainer.weights.errors import ProofError
from stage2_trainer.weights.held_versions import HeldVersions
from stage2_trainer.weights.merge import WeightSource, merged_weights, touches_vision
from stage2_trainer.weights.probe import Probe
from stage2_trainer.weights.rounding import KeptUpdate, rounding_of
from stage2_trainer.weights.sync_report import SyncReport
from stage2_trainer.wire.rollout import FinishReason, Outcome, Refused, Rollout, RolloutRequest, Sampling
from stage2_trainer.wire.seeds import SeedPlan

logger = logging.getLogger(__name__)

SERVER = "colocate"  # where rollouts of this backend come from, in logs
STEPS_BETWEEN_MEETINGS = 8  # of an engine of several processes, which stop after the same token
DROPS_WEIGHTS = 2  # the sleep level after which an engine has no weights any more


class ColocateEngine:
    """One vLLM engine, or this process's part of one.

    options: arguments of vLLM's `LLM`. environment: variables to set before vLLM is imported, unless they are set.
    sleep_level: how deep the engine sleeps between rollouts; 0 = not. infer_batch_size: most requests of one call.
    rounding: how merged weights are cast. `stops` says whether answers are not wanted any more.
    """

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
        self._held = HeldVersions()
        self._asleep = False
        self._llm: Any = None
        self._parallel: TensorParallel

    def start(self) -> None:
        """Start vLLM, if it does not run yet, and let it sleep until it is needed."""
        if self._llm is not None:
            return
        start = time.monotonic()
        for name, value in self._environment.items():
            os.environ.setdefault(name, value)
        import vllm

        self._parallel = TensorParallel(self._options["tensor_parallel_size"])
        free_shared_memory(self._parallel.ranks)
        self._llm = vllm.LLM(**self._options)
        before_each_step(self._llm, self._stop_if_unwanted)
        logger.info("vLLM %s started in this process in %.0f s", vllm.__version__, time.monotonic() - start)
        self._sleep()

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give the engine what can have changed in the model since the last time, and drop what it cached.

        Raises:
            ProofError: afterwards it does not answer with these weights.
        """
        start = time.monotonic()
        self._wake()
        kept = KeptUpdate()
        source = merged_weights(model, rounding=rounding_of(self._rounding, version), kept=kept)
        stale = source.only(self._held.stale_names(source))
        self._load(stale)
        self._held.record(source)
        self._forget(vision=touches_vision(stale.names()))
        self._prover.after_sync(model, self.prompt_logprobs)
        return SyncReport(
            version=version,
            seconds=time.monotonic() - start,
            bytes=sum(meta.nbytes for meta in stale.metadata()),
            tensors=len(stale.entries),
            servers=(SERVER,),
            everything=len(stale.entries) == len(source.entries),
            rounding_kept=kept.share(),
        )

    def generate(
        self, requests: Sequence[RolloutRequest], *, seed_plan: SeedPlan, version: int | None = None
    ) -> list[Outcome]:
        """Return what came of each of this process's requests; the group answers those of all its members.

        Raises:
            Interrupted: answers are not wanted any more; in all members of the group after the same step.
        """
        mine = [(list(request.messages), seed_plan.seed(i)) for i, request in enumerate(requests)]
        everyone, own = self._parallel.together(mine)
        self._wake()
        answers = [answer for part in self._calls(everyone) for answer in self._answered(part)]
        self._sleep()
        return [one if isinstance(one, Refused) else _rollout(one, version or 0) for one in answers[own]]

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

    def _calls(self, requests: list[Any]) -> list[list[Any]]:
        size = self._batch_size if self._batch_size and self._batch_size > 0 else max(len(requests), 1)
        return [requests[start : start + size] for start in range(0, len(requests), size)]

    def _answered(self, requests: Sequence[tuple[list[Any], int]]) -> list[Any]:
        """Return vLLM's answers, or what it refused; all members of the group ask the same."""
        from vllm.exceptions import VLLMClientError

        return asked_in_parts(self._chat, requests, refuses=lambda error: isinstance(error, VLLMClientError))

    def _chat(self, requests: Sequence[tuple[list[Any], int]]) -> list[Any]:
        import vllm

        fields: dict[str, Any] = dict(self._sampling.parameters())
        if (repetition := self._sampling.repetition) is not None:
            fields["repetition_detection"] = vllm.sampling_params.RepetitionDetectionParams(**asdict(repetition))
        sampling = [vllm.SamplingParams(**fields, seed=seed) for _, seed in requests]
        answers: list[Any] = self._llm.chat([messages for messages, _ in requests], sampling, use_tqdm=False)
        if len(answers) != len(requests):
            raise RuntimeError(f"{len(answers)} answers to {len(requests)} requests")
        return answers

    def _stop_if_unwanted(self) -> None:
        """Look whether answers are still wanted; members of a group, which make the same steps, at every eighth."""
        self._steps += 1
        if self._parallel.size > 1 and self._steps % STEPS_BETWEEN_MEETINGS:
            return
        if any(self._parallel.together([self.stops()])[0]):
            raise Interrupted("answers are not wanted any more")

    def _load(self, source: WeightSource) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        def load(model: Any) -> None:
            initialize_layerwise_reload(model)
            model.load_weights(iter(source))
            finish_layerwise_reload(model, self._llm.model_config)

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
        if self._sleep_level and not self._asleep:
            self._llm.sleep(level=self._sleep_level)
            self._asleep = True
            if self._sleep_level == DROPS_WEIGHTS:
                self._held.forget()

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False


def _rollout(answer: Any, version: int) -> Rollout:
    """Read one of vLLM's answers.

    Raises:
        RuntimeError: the request failed or was aborted.
    """
    (choice,) = answer.outputs
    if choice.finish_reason not in get_args(FinishReason) or not answer.prompt_token_ids:
        raise RuntimeError(f"request {answer.request_id} ended with {choice.finish_reason!r} and no rollout")
    return Rollout(
        prompt_token_ids=list(answer.prompt_token_ids),
        token_ids=list(choice.token_ids),
        text=choice.text,
        server=SERVER,
        version=version,
        finish_reason=choice.finish_reason,
    )
