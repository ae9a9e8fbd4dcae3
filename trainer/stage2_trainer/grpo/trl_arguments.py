"""From the training YAML to the arguments of TRL's trainer."""

from __future__ import annotations

from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from stage2_api.runconfig import RunConfig
from stage2_trainer.process.training_arguments import training_options

_SAME_NAME = (
    "num_generations",
    "num_iterations",
    "temperature",
    "repetition_penalty",
    "max_completion_length",
    "epsilon",
    "epsilon_high",
    "loss_type",
)


def grpo_arguments(config: RunConfig, *, world_size: int, adapted: bool) -> Any:
    """Return the arguments of a run in `world_size` processes.

    adapted: whether adapters train. TRL is then told of no divergence, for it would keep a copy of the adapter as the
    reference; a fresh adapter changes nothing, so the model without it is the reference.
    """
    rlhf = config.rlhf
    assert rlhf is not None, "a GRPO run"
    batches = config.grpo_batches(world_size)
    shared = training_options(config, world_size=world_size)
    planned = config.custom.grpo.batch_plan.enabled
    return GRPOConfig(
        **{
            **shared,
            **{name: getattr(rlhf, name) for name in _SAME_NAME},
            "per_device_train_batch_size": batches.per_device,
            "per_device_eval_batch_size": (
                batches.per_device if planned else config.training.per_device_eval_batch_size
            ),
            "gradient_accumulation_steps": batches.accumulation,
            "generation_batch_size": batches.generation,
            "num_generations_eval": 1,
            "scale_rewards": rlhf.resolved_scale,
            "reward_weights": rlhf.resolved_weights,
            "beta": 0.0 if adapted else rlhf.beta,
            # every optimizer step is in the log
            "logging_steps": 1,
            "use_vllm": False,
            "shuffle_dataset": True,
        }
    )
