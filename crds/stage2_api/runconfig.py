"""RunConfig: the whole training YAML, the rollouts and batches of a GRPO run, and keys that need the network.

Source: semantics sections 3, 15.1 and 15.2.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from stage2_api.custom import Custom
from stage2_api.errors import refused
from stage2_api.grpo import Rlhf, RolloutServer
from stage2_api.model import Model, Template, Tuner
from stage2_api.rollout_matching import RolloutMatching
from stage2_api.section import Positive, Section
from stage2_api.training import Training
from stage2_api.vllm import VllmServerEntry

BEST_METRIC = "eval_rollout_f1_class_iou50"


class RunConfig(Section):
    """The training YAML, with the keys of existing files."""

    model: Model
    """Model that is trained."""
    template: Template = Template()
    """Prompts: chat template, lengths and image sizes."""
    tuner: Tuner = Tuner()
    """Weights to train: all of them, or adapters."""
    training: Training
    """Optimizer, batches, packing, logging and checkpoints."""
    custom: Custom
    """Data, prompt and trainer variant."""
    rlhf: Rlhf | None = None
    """Learner of a GRPO run."""
    global_max_length: Positive | None = None
    """Maximum sequence length in tokens, and length of packed rows; overrides `template.max_length`."""
    deepspeed: Annotated[
        str | dict[str, Any] | None,
        Field(json_schema_extra={"x-stage2-schema": {"x-kubernetes-preserve-unknown-fields": True}}),
    ] = None
    """DeepSpeed configuration: a file, the configuration itself, or `{enabled: true, config: zero2.json}`; null means
    none."""

    @property
    def rollout_matching(self) -> RolloutMatching:
        """`custom.extra.rollout_matching`, with the coordinate loss of `custom.coord_soft_ce_w1` where it sets none.

        In a GRPO run its settings come from `rlhf` and `custom.extra.rollout_server`. In a run without rollouts the
        backend is `hf`, so that nothing waits for vLLM.
        """
        if self.rlhf is not None:
            return served_rollouts(self.rlhf, self.custom)
        matching = self.custom.rollout_matching
        return matching if self.makes_rollouts else matching.model_copy(update={"rollout_backend": "hf"})

    @property
    def best_metric(self) -> str | None:
        """The evaluation metric by which checkpoints are compared; None where none are."""
        training = self.training
        own = None if self.rlhf is not None or training.eval_strategy == "no" else BEST_METRIC
        return training.metric_for_best_model or own

    @property
    def is_supervised(self) -> bool:
        """Whether the run trains on the ground truth itself (stage 1)."""
        return self.custom.trainer_variant == "sft"

    @property
    def makes_rollouts(self) -> bool:
        """Whether training or evaluation generates answers."""
        return not self.is_supervised or self.training.eval_strategy != "no"

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model on each rollout server."""
        return 1 if self.rlhf is None else server_size(self.custom, "data_parallel_size") or 1

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed is configured and enabled."""
        if isinstance(self.deepspeed, dict):
            return self.deepspeed.get("enabled") is not False
        return bool(self.deepspeed)

    @property
    def lists_objects(self) -> bool:
        """Whether answers list objects, as JSON; otherwise they are summaries."""
        return not self.custom.use_summary

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length in tokens: `global_max_length`, else `template.max_length`, else None."""
        return self.global_max_length or self.template.max_length

    @property
    def packing_length(self) -> int:
        """Tokens of one packed row.

        Raises:
            ConfigError: no length is configured.
        """
        length = self.max_length or self.training.packing_length
        if length is None:
            raise refused("global_max_length", None, "packing needs the length of a row", "set it")
        return length

    @property
    def shares_rows(self) -> bool:
        """Whether learner processes share the rows of each step (`vllm.server.learners`)."""
        matching = self.rollout_matching
        return self.rlhf is None and matching.uses_servers and matching.vllm.server.learners == "sharded"

    def readers(self, world_size: int) -> int:
        """Return how many of `world_size` learner processes have raw batches of their own."""
        return 1 if self.shares_rows else world_size

    def grpo_batches(self, world_size: int) -> GrpoBatches:
        """Return the batches of a GRPO run in `world_size` learner processes; `batch_problems` checks whether they
        fit."""
        assert self.rlhf is not None, "a GRPO run"
        rlhf, plan, training = self.rlhf, self.custom.grpo.batch_plan, self.training
        per_device = (plan.enabled and plan.per_device_train_batch_size) or training.per_device_train_batch_size
        unified = plan.unified_batch_size if plan.enabled else None
        micro_batch = per_device * world_size
        effective = unified or training.effective_batch_size
        accumulation = -(-effective // micro_batch) if effective else training.gradient_accumulation_steps or 1
        generation = unified or rlhf.generation_batch_size or micro_batch * (rlhf.steps_per_generation or accumulation)
        return GrpoBatches(
            per_device, accumulation, generation, rlhf.num_generations, rlhf.num_iterations, world_size=world_size
        )

    def gradient_accumulation_steps(self, world_size: int = 1) -> int:
        """Return the micro-steps of one optimizer step in `world_size` learner processes."""
        training = self.training
        if self.rlhf is not None:
            return self.grpo_batches(world_size).accumulation
        if training.effective_batch_size is None:
            return training.gradient_accumulation_steps or 1
        micro_batch = training.per_device_train_batch_size * self.readers(world_size)
        return max(1, math.ceil(training.effective_batch_size / micro_batch))


HUB_NAME = re.compile(r"(?!\.+/)[\w.-]+/[\w.-]+")
"""Name of a repository on a model hub: owner/name."""
FOLDER = re.compile(r"[/.].*")
"""An absolute or relative path, as opposed to a hub name."""
LOCAL_TRACKERS = frozenset({"tensorboard", "none"})
"""Values of `training.report_to` that need no network."""


_SAME = (
    "max_model_len", "gpu_memory_utilization", "enable_prefix_caching", "disable_custom_all_reduce",
    "enforce_eager", "limit_mm_per_prompt",
)  # fmt: skip
"""Keys of `rollout_matching.vllm` that `custom.extra.rollout_server` has with the prefix `vllm_`."""


def served_rollouts(rlhf: Rlhf, custom: Custom) -> RolloutMatching:
    """Return the rollout settings of a GRPO run in the form of `rollout_matching`."""
    own, plan = custom.extra.rollout_matching, custom.grpo.batch_plan
    server = custom.extra.rollout_server or RolloutServer(vllm_max_model_len=rlhf.max_completion_length + 1)
    tensor_parallel_size = server_size(custom, "tensor_parallel_size") or 1
    per_gpu = plan.rollout_server.max_num_seqs_per_gpu if plan.enabled else None
    url = f"http://{rlhf.vllm_server_host[0]}:{rlhf.vllm_server_port[0]}"
    entry = VllmServerEntry(base_url=url, group_port=rlhf.vllm_server_group_port[0])
    addresses = {"servers": own.vllm.server.servers or [entry], "timeout_s": rlhf.vllm_server_timeout}
    vllm = own.vllm.model_copy(
        update={
            **{name: getattr(server, f"vllm_{name}") for name in _SAME},
            "mode": "server",
            "tensor_parallel_size": tensor_parallel_size,
            "engine": server.passed_through() or None,
            "max_num_seqs": per_gpu * tensor_parallel_size if per_gpu else server.vllm_max_num_seqs,
            "server": own.vllm.server.model_copy(update=addresses),  # a job has filled in servers
        }
    )
    return own.model_copy(
        update={
            "max_new_tokens": rlhf.max_completion_length,
            "temperature": rlhf.temperature,
            "repetition_penalty": rlhf.repetition_penalty,
            "rollout_backend": "vllm",
            "vllm": vllm,
        }
    )


def server_size(custom: Custom, name: str) -> int | None:
    """Return a size of the GRPO server: the one that the batch plan forces, or else the server's own."""
    plan, server = custom.grpo.batch_plan, custom.extra.rollout_server
    forced: int | None = getattr(plan.rollout_server, f"force_vllm_{name}") if plan.enabled else None
    return forced or (getattr(server, f"vllm_{name}") if server else None)


@dataclass(frozen=True)
class GrpoBatches:
    """The batches of a run in `world_size` learner processes, from the batch plan if there is one.

    per_device: answers of one micro-step in each process. accumulation: micro-steps of one optimizer step.
    generation: answers of one round of rollouts over all processes.
    """

    per_device: int
    accumulation: int
    generation: int
    num_generations: int
    num_iterations: int
    world_size: int

    @property
    def micro_batch(self) -> int:
        """Answers of one micro-step over all processes."""
        return self.per_device * self.world_size

    @property
    def steps_per_generation(self) -> int:
        """Micro-steps that train on one round of rollouts."""
        return self.generation // self.micro_batch

    @property
    def prompts(self) -> int:
        """Prompts of one round of rollouts."""
        return self.generation // self.num_generations

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether weights change between a round of rollouts and the last micro-step that trains on it."""
        return self.accumulation % (self.steps_per_generation * self.num_iterations) != 0


def named_elsewhere(config: RunConfig) -> list[str]:
    """Return the keys whose values need connections out of the cluster, as paths below `config`."""
    found = ["model.model"] if HUB_NAME.fullmatch(config.model.model) else []
    if set(config.training.report_to) - LOCAL_TRACKERS:
        found.append("training.report_to")
    return found
