"""Batch arithmetic of GRPO: micro-batches, rounds of rollouts and groups, and whether they fit one another.

Source: semantics section 15.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage2_api.errors import Problem

if TYPE_CHECKING:
    from stage2_api.runconfig import RunConfig

_PER_DEVICE = "training.per_device_train_batch_size"
_UNIFIED = "custom.grpo.batch_plan.unified_batch_size"


@dataclass(frozen=True)
class GrpoBatches:
    """The batches of a run in `world_size` learner processes; the batch plan, where there is one, decides.

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
        """Whether weights move between a round of rollouts and the last micro-step that trains on it."""
        return self.accumulation % (self.steps_per_generation * self.num_iterations) != 0


def grpo_batches(config: RunConfig, world_size: int) -> GrpoBatches:
    """The batches of a GRPO run; `batch_problems` says whether they fit."""
    rlhf, plan, training = config.rlhf, config.custom.grpo.batch_plan, config.training
    assert rlhf is not None, "a GRPO run"
    per_device = (plan.enabled and plan.per_device_train_batch_size) or training.per_device_train_batch_size
    unified = plan.unified_batch_size if plan.enabled else None
    micro_batch = per_device * world_size
    effective = unified or training.effective_batch_size
    accumulation = -(-effective // micro_batch) if effective else training.gradient_accumulation_steps or 1
    generation = unified or rlhf.generation_batch_size or micro_batch * (rlhf.steps_per_generation or accumulation)
    return GrpoBatches(
        per_device, accumulation, generation, rlhf.num_generations, rlhf.num_iterations, world_size=world_size
    )


def batch_problems(config: RunConfig, world_size: int, *, root: str = "") -> list[Problem]:
    """What does not fit in `world_size` learner processes; `root` stands before the paths."""
    batches, plan = grpo_batches(config, world_size), config.custom.grpo.batch_plan
    path = _UNIFIED if plan.enabled else _generation_path(config)
    problems = []
    if batches.generation % batches.micro_batch:
        rule = (
            f"must be a multiple of {batches.micro_batch}, {_PER_DEVICE} times learner processes"
            f" ({batches.per_device} * {world_size})"
        )
        way_out = f"set it to {_next(batches.generation, batches.micro_batch)}, or change {_PER_DEVICE}"
        problems.append(Problem(f"{root}{path}", batches.generation, rule, way_out))
    if batches.generation % batches.num_generations:
        rule = f"must be a multiple of rlhf.num_generations, which is {batches.num_generations}"
        way_out = f"set it to {_next(batches.generation, batches.num_generations)}, or change rlhf.num_generations"
        problems.append(Problem(f"{root}{path}", batches.generation, rule, way_out))
    return problems


def _generation_path(config: RunConfig) -> str:
    assert config.rlhf is not None, "a GRPO run"
    return "rlhf.generation_batch_size" if config.rlhf.generation_batch_size else _PER_DEVICE


def _next(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor
