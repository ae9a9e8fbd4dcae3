"""From the training YAML to transformers' TrainingArguments."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments

from stage2_api.runconfig import RunConfig
from stage2_trainer.model.deepspeed_compat import compile_nothing
from stage2_trainer.model.deepspeed_config import deepspeed_options

# Keys of `training` that TrainingArguments has under the same name, with the same meaning.
_SAME_NAME = (
    "output_dir", "run_name", "num_train_epochs", "max_steps", "per_device_train_batch_size",
    "per_device_eval_batch_size", "learning_rate", "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
    "lr_scheduler_type", "lr_scheduler_kwargs", "max_grad_norm", "bf16", "fp16", "gradient_checkpointing", "seed",
    "data_seed", "logging_steps", "logging_first_step", "save_strategy", "save_steps", "save_total_limit",
    "save_only_model", "eval_strategy", "eval_steps", "greater_is_better",
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_drop_last",
)  # fmt: skip


def training_arguments(config: RunConfig, *, world_size: int) -> TrainingArguments:
    """Return the arguments of a run in `world_size` processes."""
    return TrainingArguments(**training_options(config, world_size=world_size))


def training_options(config: RunConfig, *, world_size: int) -> dict[str, Any]:
    """Return the arguments of a run in `world_size` processes, by name.

    Evaluation, where it is on, also runs before the first step, to show what training changes.
    """
    training = config.training
    use_cpu = not torch.cuda.is_available()
    if config.uses_deepspeed and use_cpu:  # processes join as soon as the arguments exist
        compile_nothing()
    return {
        **{name: getattr(training, name) for name in _SAME_NAME},
        "gradient_accumulation_steps": config.gradient_accumulation_steps(world_size),
        "metric_for_best_model": config.best_metric,
        # transformers reads a number below 1 as a share of all steps
        "warmup_steps": training.warmup_steps or training.warmup_ratio,
        # with re-entrance, adapters on a frozen base get no gradients
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if training.gradient_checkpointing else None,
        "eval_on_start": training.eval_strategy != "no",
        "report_to": list(training.report_to) or "none",
        "dataloader_pin_memory": training.dataloader_pin_memory and not use_cpu,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # it would wait for the device at each micro-step
        "use_cpu": use_cpu,
        "deepspeed": deepspeed_options(config),
    }
