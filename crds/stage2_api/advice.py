"""Settings that are right in form but do nothing, or little, in this run, or need what our image lacks.

Told to a person, never an error.
"""

from __future__ import annotations

from collections.abc import Callable

from stage2_api.errors import Problem
from stage2_api.rollout_matching import RolloutMatching
from stage2_api.runconfig import RunConfig
from stage2_api.validation import key_paths

_MATCHING = "custom.extra.rollout_matching"

Idle = Callable[[RunConfig], bool]


def _asks_swift(matching: RolloutMatching) -> bool:
    return matching.rollout_backend == "vllm" and not matching.colocates and matching.vllm.server.protocol == "swift"


_IDLE: tuple[tuple[str, Idle, str, str], ...] = (
    (
        "model.attn_impl",
        lambda c: c.model.attn_impl == "flash_attention_3",
        "needs a package that the trainer image of this project does not have: a learner without it ends at its start",
        "set it to auto, or install the package into an image of your own",
    ),
    (
        "training.packing_length",
        lambda c: c.training.packing_length is not None,
        "is deprecated, and used only if no other length is set",
        "set global_max_length instead",
    ),
    (
        f"{_MATCHING}.post_rollout_pack_scope",
        lambda c: (
            c.rlhf is None
            and c.training.packing
            and c.rollout_matching.post_rollout_pack_scope == "micro"
            and c.training.per_device_train_batch_size == 1
        ),
        "micro packs the answers of one micro-step and what is left of others, here one answer a row",
        "set it to step: as few rows as hold the answers of an optimizer step",
    ),
    (
        "training.eval_packing",
        lambda c: c.training.eval_packing,
        "evaluation has no forward pass to pack",
        "remove it",
    ),
    (
        "training.add_version",
        lambda c: c.training.add_version,
        "checkpoints go into output_dir itself, where a restarted job finds them",
        "remove it",
    ),
    (
        "training.logging_dir",
        lambda c: c.training.logging_dir is not None,
        "trackers write into output_dir",
        "remove it",
    ),
    (
        "training.save_delay_steps",
        lambda c: c.training.save_delay_steps is not None,
        "checkpoints are written from the start, so that a restarted job loses little",
        "remove it, or raise save_steps",
    ),
    (
        "training.save_last_epoch",
        lambda c: c.training.save_last_epoch,
        "the last step is saved anyway",
        "remove it",
    ),
    (
        "template.truncation_strategy",
        lambda c: c.template.truncation_strategy != "raise",
        "a prompt that is too long is refused: cut, it would not be the one that was rolled out",
        "remove it",
    ),
    (
        "rlhf.truncation_strategy",
        lambda c: c.rlhf is not None and "truncation_strategy" in c.rlhf.model_fields_set,
        "a prompt that is too long is refused: cut, it would not be the one that was rolled out",
        "remove it",
    ),
    (
        "custom.extra.rollout_server.vllm_use_async_engine",
        lambda c: (
            c.custom.extra.rollout_server is not None
            and c.custom.extra.rollout_server.vllm_use_async_engine is not None
        ),
        "these servers always run vLLM's asynchronous engine",
        "remove it",
    ),
    (
        f"{_MATCHING}.repeat_terminate.enabled",
        lambda c: c.rollout_matching.repeat_terminate.enabled and _asks_swift(c.rollout_matching),
        "servers of `swift rollout` have no such check",
        "raise repetition_penalty a little, or set vllm.server.protocol to vllm",
    ),
    (
        f"{_MATCHING}.repeat_terminate.max_object_keys",
        lambda c: (
            c.rollout_matching.repeat_terminate.max_object_keys is not None
            and c.rollout_matching.rollout_backend == "vllm"
        ),
        "vLLM looks for repeated sequences only, and does not count objects",
        "lower max_new_tokens, or set rollout_backend to hf",
    ),
    (
        f"{_MATCHING}.offload.enabled",
        lambda c: c.rollout_matching.offload.enabled and not c.rollout_matching.colocates,
        "training state moves only for a vLLM in the learner's own processes",
        "set it to false",
    ),
    (
        f"{_MATCHING}.rollout_buffer.enabled",
        lambda c: c.rollout_matching.rollout_buffer.enabled and c.rollout_matching.rollout_buffer.m_steps == 1,
        "with m_steps 1 no rollout is used twice",
        "raise rollout_buffer.m_steps",
    ),
    (
        f"{_MATCHING}.unmatched_weight",
        lambda c: (
            "unmatched_weight" in c.rollout_matching.model_fields_set
            and c.rollout_matching.unmatched_objects != "penalised"
        ),
        "only unmatched_objects penalised has a weight",
        "set unmatched_objects to penalised, or remove it",
    ),
    (
        f"{_MATCHING}.recovery.rollouts",
        lambda c: c.rollout_matching.recovery.rollouts == 1 and bool(c.rollout_matching.recovery.model_fields_set),
        "one rollout of a sample leaves none that could find what it missed: temperature and weight do nothing",
        "set recovery.rollouts above 1, or remove recovery",
    ),
    (
        f"{_MATCHING}.runaway.enabled",
        lambda c: not c.rollout_matching.runaway.enabled and bool(c.rollout_matching.runaway.model_fields_set),
        "the limits of runaway end nothing",
        "set it to true, or remove the section",
    ),
    (
        f"{_MATCHING}.num_beams",
        lambda c: c.rollout_matching.num_beams > 1 and c.rollout_matching.decode_mode != "beam",
        "greedy decoding has no beams",
        "set decode_mode to beam (and rollout_backend to hf)",
    ),
    (
        f"{_MATCHING}.vllm.sync.mode",
        lambda c: (
            c.rollout_matching.vllm.sync.mode == "auto" and c.rollout_matching.vllm.enable_lora and c.tuner.use_dora
        ),
        "auto takes full here, for vLLM cannot load DoRA adapters",
        "set it to full",
    ),
)


def idle_settings(config: RunConfig) -> tuple[Problem, ...]:
    """Return the settings of a configuration that do nothing, with the reason and what to do about it."""
    written = config.model_dump(exclude_unset=True)
    return tuple(
        Problem(path, key_paths.value_at(config, written, path), reason, way_out)
        for path, idle, reason, way_out in _IDLE
        if idle(config)
    )
