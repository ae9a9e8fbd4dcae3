"""Batch arithmetic of GRPO: micro-batches, rounds of rollouts and groups.

Source: semantics section 15.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from stage2_api.grpo import BatchPlan, Rlhf
from stage2_api.training import Training


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


def grpo_batches(rlhf: Rlhf, plan: BatchPlan, training: Training, world_size: int) -> GrpoBatches:
    """Return the batches of a GRPO run; the rules of batches say whether they fit."""
    per_device = (plan.enabled and plan.per_device_train_batch_size) or training.per_device_train_batch_size
    unified = plan.unified_batch_size if plan.enabled else None
    micro_batch = per_device * world_size
    effective = unified or training.effective_batch_size
    accumulation = -(-effective // micro_batch) if effective else training.gradient_accumulation_steps or 1
    generation = unified or rlhf.generation_batch_size or micro_batch * (rlhf.steps_per_generation or accumulation)
    return GrpoBatches(
        per_device, accumulation, generation, rlhf.num_generations, rlhf.num_iterations, world_size=world_size
    )
