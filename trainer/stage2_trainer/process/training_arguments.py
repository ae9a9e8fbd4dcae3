"""From the training YAML to what the libraries take: transformers' TrainingArguments and peft's LoRA options."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments

from stage2_api.runconfig import RunConfig
from stage2_trainer.process.deepspeed_compat import compile_nothing
from stage2_trainer.process.qwen3_vl import ALIGNER, LLM, VIT
from stage2_trainer.process.supported import deepspeed_config

# Keys of `training` that TrainingArguments has under the same name, with the same meaning.
_SAME_NAME = (
    "output_dir",
    "run_name",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "learning_rate",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "max_grad_norm",
    "bf16",
    "fp16",
    "gradient_checkpointing",
    "seed",
    "data_seed",
    "logging_steps",
    "logging_first_step",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "save_only_model",
    "eval_strategy",
    "eval_steps",
    "greater_is_better",
    "load_best_model_at_end",
    "dataloader_num_workers",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_drop_last",
)
_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def training_arguments(config: RunConfig, *, world_size: int) -> TrainingArguments:
    """Return the arguments of a run in `world_size` processes."""
    return TrainingArguments(**training_options(config, world_size=world_size))


def training_options(config: RunConfig, *, world_size: int) -> dict[str, Any]:
    """Return the arguments of a run in `world_size` processes, by name.

    Evaluation, where it is on, also runs before the first step: without it nobody knows what training changed.
    """
    training = config.training
    use_cpu = not torch.cuda.is_available()
    if config.uses_deepspeed and use_cpu:  # processes join as soon as arguments are made
        compile_nothing()
    return {
        **{name: getattr(training, name) for name in _SAME_NAME},
        "gradient_accumulation_steps": config.gradient_accumulation_steps(world_size),
        "metric_for_best_model": config.best_metric,
        # transformers reads a number below 1 as a share of all steps
        "warmup_steps": training.warmup_steps or training.warmup_ratio,
        # without re-entrance adapters on a frozen base get gradients
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if training.gradient_checkpointing else None,
        "eval_on_start": training.eval_strategy != "no",
        "report_to": list(training.report_to) or "none",
        "dataloader_pin_memory": training.dataloader_pin_memory and not use_cpu,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # it waits for the device at each micro-step
        "use_cpu": use_cpu,
        "deepspeed": deepspeed_config(config),
    }


def dtype(config: RunConfig) -> torch.dtype | None:
    """Return the number format in which weights are loaded; None for the checkpoint's own."""
    return _DTYPES[config.model.torch_dtype]


def frozen_parts(config: RunConfig) -> list[str]:
    """Return the parts of the model that do not train."""
    tuner = config.tuner
    flags = {LLM: tuner.freeze_llm, VIT: tuner.freeze_vit, ALIGNER: tuner.freeze_aligner}
    return [part for part, frozen in flags.items() if frozen]


def adapter_options(config: RunConfig) -> dict[str, Any]:
    """Return the fields of peft's LoraConfig."""
    tuner = config.tuner
    return {
        "r": tuner.lora_rank,
        "lora_alpha": tuner.lora_alpha,
        "lora_dropout": tuner.lora_dropout,
        "bias": tuner.lora_bias,
        "use_dora": tuner.use_dora,
        "target_modules": tuner.target_modules,
        "modules_to_save": tuner.modules_to_save or None,
    }


def pixel_limits(config: RunConfig) -> dict[str, int]:
    """Return the limits of an image's pixels that override those of the checkpoint: min_pixels, max_pixels."""
    limits = {"min_pixels": config.template.min_pixels, "max_pixels": config.template.max_pixels}
    return {name: value for name, value in limits.items() if value is not None}
