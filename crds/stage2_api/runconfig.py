"""RunConfig: the training YAML, whole."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from stage2_api.custom import Custom
from stage2_api.errors import ConfigError, Problem
from stage2_api.grpo import Rlhf
from stage2_api.grpo_batches import GrpoBatches, grpo_batches
from stage2_api.grpo_server import data_parallel_size, served_rollouts
from stage2_api.model import Model, Template
from stage2_api.rollout_matching import RolloutMatching
from stage2_api.section import Section
from stage2_api.training import Training
from stage2_api.tuner import Tuner
from stage2_api.value_types import Positive

BEST_METRIC = "eval_rollout_f1_class_iou50"


class RunConfig(Section):
    """The training YAML. Its keys are those of the files that people already have."""

    model: Model
    """Model that is trained."""
    template: Template = Template()
    """Prompts: chat template, lengths, image sizes."""
    tuner: Tuner = Tuner()
    """Trained weights: all of them or adapters."""
    training: Training
    """Optimizer, batches, packing, logging and checkpoints."""
    custom: Custom
    """Data, prompt and trainer variant."""
    rlhf: Rlhf | None = None
    """Learner of a GRPO run."""
    global_max_length: Positive | None = None
    """Longest sequence in tokens; comes before `template.max_length`. Also the length of packed rows."""
    deepspeed: Annotated[
        str | dict[str, Any] | None,
        Field(json_schema_extra={"x-stage2-schema": {"x-kubernetes-preserve-unknown-fields": True}}),
    ] = None
    """DeepSpeed configuration: a file, the configuration itself, `{enabled: true, config: zero2}`, or null for none."""

    @property
    def rollout_matching(self) -> RolloutMatching:
        """`custom.extra.rollout_matching`, with the coordinate loss of `custom.coord_soft_ce_w1` where it sets none.

        Of a GRPO run: how its rollouts are made, from `rlhf` and `custom.extra.rollout_server`. Where none are made, no
        backend is there to make them but the learner's own model.
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
        """Whether anything is generated: in training, or by evaluation."""
        return not self.is_supervised or self.training.eval_strategy != "no"

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model on each rollout server."""
        return 1 if self.rlhf is None else data_parallel_size(self.custom)

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed is configured and not switched off by `enabled: false`."""
        if isinstance(self.deepspeed, dict):
            return self.deepspeed.get("enabled") is not False
        return bool(self.deepspeed)

    @property
    def max_length(self) -> int | None:
        """Longest sequence in tokens: `global_max_length`, else `template.max_length`; None where neither is set."""
        return self.global_max_length or self.template.max_length

    @property
    def packing_length(self) -> int:
        """Tokens of one packed row.

        Raises:
            ConfigError: no length is configured.
        """
        length = self.max_length or self.training.packing_length
        if length is None:
            raise ConfigError([Problem("global_max_length", None, "packing needs the length of a row", "set it")])
        return length

    def grpo_batches(self, world_size: int) -> GrpoBatches:
        """Return the batches of a GRPO run in `world_size` learner processes."""
        assert self.rlhf is not None, "a GRPO run"
        return grpo_batches(self.rlhf, self.custom.grpo.batch_plan, self.training, world_size)

    def gradient_accumulation_steps(self, world_size: int = 1) -> int:
        """Return the micro-steps of one optimizer step in `world_size` learner processes."""
        training = self.training
        if self.rlhf is not None:
            return self.grpo_batches(world_size).accumulation
        if training.effective_batch_size is None:
            return training.gradient_accumulation_steps or 1
        return max(1, math.ceil(training.effective_batch_size / (training.per_device_train_batch_size * world_size)))
