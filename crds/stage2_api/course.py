"""The course of a run: the keys that its weights depend on, so that one output folder holds one run.

A run refuses to resume from a checkpoint of another course (`training.resume`). Every key counts unless it is listed
here: keys about the place, speed and logs of a run may change freely.
"""

from __future__ import annotations

from typing import Any

from stage2_api.rollout_matching import RECOMMENDED
from stage2_api.runconfig import RunConfig
from stage2_api.section import Section
from stage2_api.training import Training

RECORDS_OF_A_STEP = "training.effective_batch_size"
CONSTANT_RATES = frozenset({"constant"})
"""Schedules whose rate does not depend on the length of the run; they do not warm up."""
WARMED_RATES = frozenset({"constant_with_warmup", "inverse_sqrt"})
"""Schedules whose rate depends on it only where the warm-up is a share of the run."""
FOLLOWS_LENGTH = "the learning rates of its steps follow the length of the run (training.lr_scheduler_type: {})"
LENGTH = frozenset({"training.max_steps", "training.num_train_epochs"})
COMPARED_BY_CONTENT = frozenset({"model.model", "custom.train_jsonl", "custom.train_sample_limit"})
FREE = frozenset(
    {
        *(
            f"training.{key}"
            for key in (
                "output_dir", "run_name", "logging_dir", "add_version", "logging_steps", "logging_first_step", "trace",
                "report_to", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_safetensors",
                "save_last_epoch", "save_delay_steps", "eval_strategy", "eval_steps", "eval_packing",
                "per_device_eval_batch_size", "metric_for_best_model", "greater_is_better", "load_best_model_at_end",
                "resume", "resume_from_checkpoint", "gradient_checkpointing", "gradient_accumulation_steps",
                "effective_batch_size", "dataloader_num_workers", "dataloader_pin_memory",
                "dataloader_persistent_workers", "dataloader_prefetch_factor", "packing_buffer",
                "packing_min_fill_ratio", "packing_drop_last", "optimizer", "max_bad_samples",
            )
        ),
        *(
            f"custom.extra.rollout_matching.{key}"
            for key in (
                "rollout_backend", "rollout_generate_batch_size", "vllm", "offload", "image_cache_gib",
                "debug_dump_parse_failures", "debug_dump_max", "monitor_dump", "desc_monitor", "runaway",
            )
        ),
        *(f"rlhf.vllm_{key}" for key in ("mode", "server_host", "server_port", "server_group_port", "server_timeout")),
        "model.attn_impl", "model.allow_pickled_weights", "model.allow_remote_code", "custom.val_jsonl",
        "custom.image_roots", "custom.val_sample_limit", "custom.extra.rollout_server", "rlhf.use_vllm",
    }
)  # fmt: skip


def course_of(config: RunConfig, *, world_size: int) -> dict[str, Any]:
    """Return the keys of a run's course with their JSON values, without those that are compared by content.

    world_size: learner processes. Only the number of records per optimizer step counts, not their division among
    processes and micro-steps.
    """
    found: dict[str, Any] = {}
    _collect(config, "", found)
    found |= {f"custom.extra.rollout_matching.{key}": getattr(config.rollout_matching, key) for key in RECOMMENDED}
    if config.rlhf is None:
        micro_steps = config.gradient_accumulation_steps(world_size)
        micro_batch = config.training.per_device_train_batch_size * config.readers(world_size)
        found[RECORDS_OF_A_STEP] = micro_batch * micro_steps
    if not _follows_length(config.training):
        return {path: value for path, value in found.items() if path not in LENGTH}
    if config.training.max_steps > 0:
        del found["training.num_train_epochs"]
    return found


def to_train_on(training: Training) -> str:
    """Return what a person changes so that a run that has ended trains on."""
    raised = f"raise training.{'max_steps' if training.max_steps > 0 else 'num_train_epochs'}"
    if not _follows_length(training):
        return raised
    reason = FOLLOWS_LENGTH.format(training.lr_scheduler_type)
    return f"{raised}, and set training.resume: allow-changes, because {reason}"


def _follows_length(training: Training) -> bool:
    share = training.warmup_ratio > 0 and not training.warmup_steps
    warmed = training.lr_scheduler_type in WARMED_RATES and not share
    return training.lr_scheduler_type not in CONSTANT_RATES and not warmed


def _collect(section: Section, prefix: str, found: dict[str, Any]) -> None:
    dumped = section.model_dump(mode="json")
    for name in type(section).model_fields:
        path, value = f"{prefix}{name}", getattr(section, name)
        if path in FREE or path in COMPARED_BY_CONTENT:
            continue
        if isinstance(value, Section):
            _collect(value, f"{path}.", found)
        else:
            found[path] = dumped[name]
