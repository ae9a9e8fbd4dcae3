"""Advice, never an error: valid settings that do little or harm in this run, or need a package our image lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stage2_api.errors import Problem
from stage2_api.rollout_matching import RolloutMatching
from stage2_api.runconfig import RunConfig
from stage2_api.validation import key_paths
from stage2_api.vllm import OLDER_OPTIONS

_MATCHING = "custom.extra.rollout_matching"


def _uses_swift(matching: RolloutMatching) -> bool:
    return matching.rollout_backend == "vllm" and not matching.colocates and matching.vllm.server.protocol == "swift"


_TOO_LONG = "a prompt that is too long is refused: a cut prompt would not be the one that was rolled out"
_ALL_ROLLOUTS = "rollouts.jsonl has every rollout, and `stage2 report` shows them"
_IGNORED = {
    "training.eval_packing": "evaluation has no forward pass to pack",
    "training.add_version": "checkpoints go into output_dir itself, where a restarted job finds them",
    "training.logging_dir": "trackers write into output_dir",
    "training.save_delay_steps": "checkpoints are written from the start, so that a restarted job loses little",
    "training.load_best_model_at_end": "the best checkpoint is kept in any case, and `stage2 export` takes it",
    "training.save_last_epoch": "the last step is always saved",
    "template.truncation_strategy": _TOO_LONG,
    "rlhf.truncation_strategy": _TOO_LONG,
    f"{_MATCHING}.debug_dump_parse_failures": _ALL_ROLLOUTS,
    f"{_MATCHING}.debug_dump_max": _ALL_ROLLOUTS,
    f"{_MATCHING}.monitor_dump": _ALL_ROLLOUTS,
    f"{_MATCHING}.desc_monitor": "evaluations compare descriptions: `eval_rollout_desc_exact` and F1 with class",
    "custom.extra.rollout_server.vllm_use_async_engine": "the servers always run vLLM's asynchronous engine",
}
"""Keys that other trainers read and stage2 ignores, with the reason."""

_OLDER_KEYS: tuple[tuple[str, str, str], ...] = (
    *((path, reason, "remove it") for path, reason in _IGNORED.items()),
    *(
        (f"{_MATCHING}.vllm.{name}", "is the older place of an argument of vLLM", f"write it as vllm.engine.{name}")
        for name in OLDER_OPTIONS
    ),
)
"""Keys of the original stack that stage2 ignores or has elsewhere, each with the reason and the way out."""

_WITHOUT_BETAS = {"adafactor", "sgd", "adagrad", "rmsprop"}
"""Optimizers to which transformers passes neither `adam_beta1` and `adam_beta2` nor `adam_epsilon`."""

_IDLE: tuple[tuple[str, Callable[[RunConfig], bool], str, str], ...] = (
    (
        "model.attn_impl",
        lambda c: c.model.attn_impl == "flash_attention_3",
        "needs a package that stage2's trainer image does not have; without it the learner fails at its start",
        "set it to auto, or install the package into an image of your own",
    ),
    (
        "tuner.lora_dropout",
        lambda c: c.rlhf is not None and "lora_dropout" in c.tuner.model_fields_set and c.tuner.lora_dropout > 0,
        "GRPO trains adapters without dropout, because its servers answer without it",
        "set it to 0, or remove it",
    ),
    (
        "tuner.lora_dropout",
        lambda c: c.rlhf is None and c.tuner.train_type == "lora" and c.tuner.use_dora and c.tuner.lora_dropout > 0,
        "with DoRA, dropout computes the product with the base weight of each adapted layer twice: its forward pass"
        " takes 2.0 times the operations, and more memory",
        "set it to 0",
    ),
    *(
        (
            f"training.{name}",
            lambda c, name=name, without=without: (
                name in c.training.model_fields_set and c.training.optim.removeprefix("paged_") in without
            ),
            "the optimizer of training.optim has no such number",
            "remove it, or choose another optimizer",
        )
        for name, without in (
            ("adam_beta1", _WITHOUT_BETAS),
            ("adam_beta2", _WITHOUT_BETAS),
            ("adam_epsilon", _WITHOUT_BETAS | {"lion_8bit", "lion_32bit"}),
        )
    ),
    *(
        (
            f"training.{name}",
            lambda c, name=name: bool(getattr(c.training, name)) and c.training.lr_scheduler_type == "constant",
            "a constant rate has no warm-up",
            "set training.lr_scheduler_type to constant_with_warmup, or remove it",
        )
        for name in ("warmup_steps", "warmup_ratio")
    ),
    (
        "training.lr_scheduler_kwargs",
        lambda c: (
            bool(c.training.lr_scheduler_kwargs)
            and c.training.lr_scheduler_type in ("constant", "constant_with_warmup")
        ),
        "the schedule of training.lr_scheduler_type has no such numbers",
        "remove it, or choose another schedule",
    ),
    *(
        (
            f"training.{name}",
            lambda c, name=name, strategy=strategy: (
                name in c.training.model_fields_set and getattr(c.training, strategy) != "steps"
            ),
            f"it counts only where training.{strategy} is steps",
            f"set training.{strategy} to steps, or remove it",
        )
        for name, strategy in (("save_steps", "save_strategy"), ("eval_steps", "eval_strategy"))
    ),
    (
        "training.save_only_model",
        lambda c: c.training.save_only_model and c.uses_deepspeed,
        "DeepSpeed resumes with its own state, which such checkpoints lack: a restart is refused, unless ZeRO-3 keeps"
        " the weights in shards",
        "set it to false, or remove deepspeed",
    ),
    (
        "training.greater_is_better",
        lambda c: c.training.greater_is_better is not None and c.best_metric is None,
        "no checkpoint is compared with another",
        "set training.eval_strategy to steps, or remove it",
    ),
    *(
        (
            f"training.{rate}",
            lambda c, rate=rate, frozen=frozen: (
                getattr(c.training, rate) is not None and c.tuner.train_type == "full" and getattr(c.tuner, frozen)
            ),
            f"tuner.{frozen} trains nothing at this rate",
            f"set tuner.{frozen} to false, or remove it",
        )
        for rate, frozen in (("vit_lr", "freeze_vit"), ("aligner_lr", "freeze_aligner"))
    ),
    (
        "training.metric_for_best_model",
        lambda c: c.training.metric_for_best_model is not None and c.training.eval_strategy == "no",
        "a run that never evaluates has no best checkpoint",
        "set training.eval_strategy to steps, or remove it",
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
        "micro packs only the answers of one micro-step and leftovers, here one answer per row",
        "set it to step, which packs the answers of an optimizer step into as few rows as possible",
    ),
    (
        f"{_MATCHING}.recipe",
        lambda c: (
            c.custom.trainer_variant == "rollout_matching_sft"
            and "recipe" not in c.custom.extra.rollout_matching.model_fields_set
        ),
        "is not set: the default is that of the original stack, so that its files mean what they meant",
        "set it to recommended",
    ),
    (
        f"{_MATCHING}.recipe",
        lambda c: (
            c.custom.trainer_variant == "rollout_matching_sft"
            and "recipe" in c.custom.extra.rollout_matching.model_fields_set
            and c.rollout_matching.assignment == "hungarian"
            and c.rollout_matching.unmatched_objects == "neutral"
            and c.rollout_matching.supervised_share == 0
        ),
        "unmatched objects cost nothing with the specification's defaults: answers soon list objects that do not exist",
        "set it to recommended",
    ),
    (
        f"{_MATCHING}.repeat_terminate.enabled",
        lambda c: c.rollout_matching.repeat_terminate.enabled and _uses_swift(c.rollout_matching),
        "servers of `swift rollout` have no such check",
        "raise repetition_penalty a little, or set vllm.server.protocol to vllm",
    ),
    (
        f"{_MATCHING}.repeat_terminate.max_object_keys",
        lambda c: (
            c.rollout_matching.repeat_terminate.max_object_keys is not None
            and c.rollout_matching.rollout_backend == "vllm"
        ),
        "vLLM only checks for repeated sequences, and does not count objects",
        "lower max_new_tokens, or set rollout_backend to hf",
    ),
    (
        f"{_MATCHING}.offload.enabled",
        lambda c: c.rollout_matching.offload.enabled and not c.rollout_matching.colocates,
        "training state is offloaded only for a colocated vLLM",
        "set it to false",
    ),
    (
        f"{_MATCHING}.rollout_buffer.enabled",
        lambda c: c.rollout_matching.rollout_buffer.enabled and c.rollout_matching.rollout_buffer.m_steps == 1,
        "with m_steps 1 no rollout is reused",
        "raise rollout_buffer.m_steps",
    ),
    (
        f"{_MATCHING}.unmatched_weight",
        lambda c: (
            "unmatched_weight" in c.rollout_matching.model_fields_set
            and c.rollout_matching.unmatched_objects != "penalised"
        ),
        "only unmatched_objects: penalised has a weight",
        "set unmatched_objects to penalised, or remove it",
    ),
    (
        f"{_MATCHING}.runaway.enabled",
        lambda c: not c.rollout_matching.runaway.enabled and bool(c.rollout_matching.runaway.model_fields_set),
        "without runaway.enabled its limits have no effect",
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
        "auto means full here, because vLLM cannot load DoRA adapters",
        "set it to full",
    ),
)


def idle_settings(config: RunConfig) -> tuple[Problem, ...]:
    """Return the settings of a configuration that do nothing, with the reason and the way out."""
    written: Any = config.model_dump(exclude_unset=True)
    older = [
        Problem(path, value, reason, way_out)
        for path, reason, way_out in _OLDER_KEYS
        if (value := functools.reduce(lambda section, key: (section or {}).get(key), path.split("."), written))
        not in (None, False, "raise")
    ]
    idle = [
        Problem(path, key_paths.value_at(config, written, path), reason, way_out)
        for path, is_idle, reason, way_out in _IDLE
        if is_idle(config)
    ]
    return (*older, *idle)
