"""Rules of GRPO that cross keys, and how its keys become those of the rollout servers that all runs share.

Source: semantics sections 15.1, 15.2 and 15.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage2_api.grpo import RolloutServer
from stage2_api.rollout_matching import RolloutMatching
from stage2_api.validation.rule import Rule
from stage2_api.vllm import VllmServerEntry

if TYPE_CHECKING:
    from stage2_api.grpo import BatchPlan, Chord
    from stage2_api.runconfig import RunConfig

_SERVER = "custom.extra.rollout_server"
_PLAN = "custom.grpo.batch_plan"
_FORCED = f"{_PLAN}.rollout_server"
_CHORD = "custom.grpo.chord"
_MATCHING = "custom.extra.rollout_matching"
_OF_BOTH = {"server", "sync"}  # sections of rollout_matching.vllm that GRPO uses too
_CHORD_KEYS = (
    "sft_per_device_train_batch_size", "mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley",
    "enable_phi_function",
)  # fmt: skip


def served_rollouts(config: RunConfig) -> RolloutMatching:
    """The rollout settings of a GRPO run in the terms that servers, sync and requests are written in."""
    rlhf, server, own = config.rlhf, config.custom.extra.rollout_server, config.custom.extra.rollout_matching
    assert rlhf is not None, "a GRPO run"
    server = server or RolloutServer(vllm_max_model_len=rlhf.max_completion_length + 1)
    url = f"http://{rlhf.vllm_server_host[0]}:{rlhf.vllm_server_port[0]}"
    entry = VllmServerEntry(base_url=url, group_port=rlhf.vllm_server_group_port[0])
    addresses = own.vllm.server.model_copy(
        update={"servers": own.vllm.server.servers or [entry], "timeout_s": rlhf.vllm_server_timeout}
    )
    same = (
        "max_model_len", "gpu_memory_utilization", "enable_prefix_caching", "disable_custom_all_reduce",
        "enforce_eager", "limit_mm_per_prompt",
    )  # fmt: skip
    vllm = own.vllm.model_copy(
        update={
            **{name: getattr(server, f"vllm_{name}") for name in same},
            "mode": "server",
            "tensor_parallel_size": tensor_parallel_size(config),
            "max_num_seqs": _max_num_seqs(config, server),
            "server": addresses,
        }
    )
    sampling = {"max_new_tokens": rlhf.max_completion_length, "temperature": rlhf.temperature}
    return own.model_copy(
        update={**sampling, "repetition_penalty": rlhf.repetition_penalty, "rollout_backend": "vllm", "vllm": vllm}
    )


def tensor_parallel_size(config: RunConfig) -> int:
    """GPUs of each copy of the model on the rollout server of a GRPO run."""
    forced = config.custom.grpo.batch_plan.rollout_server.force_vllm_tensor_parallel_size
    server = config.custom.extra.rollout_server
    return _forced(config, forced) or (server and server.vllm_tensor_parallel_size) or 1


def data_parallel_size(config: RunConfig) -> int:
    """Copies of the model on the rollout server of a GRPO run."""
    forced = config.custom.grpo.batch_plan.rollout_server.force_vllm_data_parallel_size
    server = config.custom.extra.rollout_server
    return _forced(config, forced) or (server and server.vllm_data_parallel_size) or 1


def _max_num_seqs(config: RunConfig, server: RolloutServer) -> int:
    forced = _forced(config, config.custom.grpo.batch_plan.rollout_server.max_num_seqs_per_gpu)
    return forced * tensor_parallel_size(config) if forced else server.vllm_max_num_seqs


def _forced(config: RunConfig, value: int | None) -> int | None:
    return value if config.custom.grpo.batch_plan.enabled else None


def _server(config: RunConfig) -> RolloutServer | None:
    return config.custom.extra.rollout_server if config.rlhf is not None else None


def _misses(config: RunConfig, name: str) -> bool:
    server, forced = _server(config), config.custom.grpo.batch_plan.rollout_server
    given = server is not None and getattr(server, f"vllm_{name}") is not None
    return server is not None and not given and _forced(config, getattr(forced, f"force_vllm_{name}")) is None


def _contradicts(config: RunConfig, name: str) -> bool:
    server, forced = _server(config), config.custom.grpo.batch_plan.rollout_server
    given = server and getattr(server, f"vllm_{name}")
    return bool(given and _forced(config, getattr(forced, f"force_vllm_{name}")) not in (None, given))


def _too_short(config: RunConfig) -> bool:
    server = _server(config)
    return server is not None and server.vllm_max_model_len < (config.global_max_length or 0)


def _answer_does_not_fit(config: RunConfig) -> bool:
    server, rlhf = _server(config), config.rlhf
    return server is not None and rlhf is not None and rlhf.max_completion_length >= server.vllm_max_model_len


def _weights_do_not_pair(config: RunConfig) -> bool:
    rlhf = config.rlhf
    return rlhf is not None and rlhf.reward_weights is not None and len(rlhf.reward_weights) != len(rlhf.reward_funcs)


def _repeats_a_reward(config: RunConfig) -> bool:
    return config.rlhf is not None and len(set(config.rlhf.reward_funcs)) < len(config.rlhf.reward_funcs)


def _scores_summaries(config: RunConfig) -> bool:
    return config.rlhf is not None and any(name.startswith("summary.") for name in config.rlhf.reward_funcs)


def _plan(config: RunConfig) -> BatchPlan | None:
    plan = config.custom.grpo.batch_plan
    return plan if plan.enabled else None


def _training_differs(config: RunConfig, key: str, wanted: int | None) -> bool:
    """Whether a key of `training` was written with another value than the plan's."""
    training = config.training
    value = getattr(training, key)
    return key in training.model_fields_set and value is not None and wanted is not None and value != wanted


def _generation_differs(config: RunConfig) -> bool:
    plan, rlhf = _plan(config), config.rlhf
    given = rlhf.generation_batch_size if rlhf else None
    return plan is not None and given is not None and given != plan.unified_batch_size


def _evaluates_otherwise(config: RunConfig) -> bool:
    plan = _plan(config)
    return plan is not None and plan.per_device_eval_batch_size not in (None, plan.per_device_train_batch_size)


def _chord_lacks(config: RunConfig) -> bool:
    chord: Chord = config.custom.grpo.chord
    return chord.enabled and any(getattr(chord, name) is None for name in _CHORD_KEYS)


def _sets_matching(config: RunConfig) -> bool:
    """Whether keys of rollout matching are set beside those that GRPO shares with it."""
    own = config.custom.extra.rollout_matching
    return config.rlhf is not None and bool(own.model_fields_set - {"vllm"} or own.vllm.model_fields_set - _OF_BOTH)


def _plan_lacks(config: RunConfig, name: str) -> bool:
    plan = _plan(config)
    return plan is not None and getattr(plan, name) is None


def _gives_grpo_keys_alone(config: RunConfig) -> bool:
    custom = config.custom
    return config.rlhf is None and ("grpo" in custom.model_fields_set or custom.use_summary)


_MODE: tuple[Rule[RunConfig], ...] = (
    Rule(
        path="rlhf",
        broken=lambda c: c.custom.trainer_variant == "grpo" and c.rlhf is None,
        cel="$(custom.trainer_variant) != 'grpo' || $?(rlhf)",
        rule="custom.trainer_variant grpo needs it",
        way_out="write the section with at least rlhf.reward_funcs, or set custom.trainer_variant otherwise",
    ),
    Rule(
        path="custom.trainer_variant",
        broken=lambda c: c.custom.trainer_variant != "grpo" and c.rlhf is not None,
        cel="$(custom.trainer_variant) == 'grpo' || !$?(rlhf)",
        rule="rlhf belongs to another trainer",
        way_out="set custom.trainer_variant to grpo, or remove rlhf",
    ),
    Rule(
        path="rlhf.use_vllm",
        broken=lambda c: c.rlhf is not None and not c.rlhf.use_vllm,
        cel="!$?(rlhf) || $(rlhf.use_vllm)",
        rule="rollouts of GRPO are made by vLLM",
        way_out="set it to true",
    ),
    Rule(
        path="rlhf.vllm_mode",
        broken=lambda c: c.rlhf is not None and c.rlhf.vllm_mode != "server",
        cel="!$?(rlhf) || $(rlhf.vllm_mode) == 'server'",
        rule="rollouts of GRPO are made by a server on GPUs of its own",
        way_out="set it to server, and describe the server under custom.extra.rollout_server",
    ),
    Rule(
        path=_SERVER,
        broken=lambda c: c.rlhf is not None and c.rlhf.vllm_mode == "server" and _server(c) is None,
        cel=f"!$?(rlhf) || $(rlhf.vllm_mode) != 'server' || $?({_SERVER})",
        rule="rlhf.vllm_mode server needs to know how its server is started",
        way_out=(
            "write the section with at least vllm_tensor_parallel_size, vllm_data_parallel_size and vllm_max_model_len"
        ),
    ),
    Rule(
        path=_SERVER,
        broken=lambda c: c.rlhf is None and c.custom.extra.rollout_server is not None,
        cel=f"$?(rlhf) || !$?({_SERVER})",
        rule="belongs to GRPO, which rlhf turns on",
        way_out=f"remove it; {_MATCHING}.vllm describes the servers of rollout matching",
    ),
    Rule(
        path=_MATCHING,
        broken=_sets_matching,
        cel=None,
        rule="GRPO takes only its sections vllm.server and vllm.sync",
        way_out=f"remove the other keys; rlhf describes sampling, {_SERVER} the server",
    ),
    Rule(
        path="custom.grpo",
        broken=_gives_grpo_keys_alone,
        reads=("custom.use_summary", "rlhf"),
        cel=None,
        rule="custom.grpo and custom.use_summary belong to GRPO, which rlhf turns on",
        way_out="remove them, or write rlhf",
    ),
    Rule(
        path="training.packing",
        broken=lambda c: c.rlhf is not None and c.training.packing,
        cel="!$?(rlhf) || !$(training.packing)",
        rule="GRPO pads its batches, it does not pack them",
        way_out="set it to false",
    ),
)

_SERVER_RULES: tuple[Rule[RunConfig], ...] = (
    *(
        Rule(
            path=f"{_SERVER}.vllm_{name}",
            broken=lambda c, name=name: _misses(c, name),  # type: ignore[misc]
            reads=(f"{_FORCED}.force_vllm_{name}", f"{_PLAN}.enabled"),
            cel=None,
            rule="is required",
            way_out=f"set it: {meaning}",
        )
        for name, meaning in (
            ("tensor_parallel_size", "GPUs that share one copy of the model"),
            ("data_parallel_size", "copies of the model"),
        )
    ),
    *(
        Rule(
            path=f"{_FORCED}.force_vllm_{name}",
            broken=lambda c, name=name: _contradicts(c, name),  # type: ignore[misc]
            reads=(f"{_SERVER}.vllm_{name}", f"{_PLAN}.enabled"),
            cel=None,
            rule=f"differs from {_SERVER}.vllm_{name}",
            way_out="remove one of the two",
        )
        for name in ("tensor_parallel_size", "data_parallel_size")
    ),
    Rule(
        path=f"{_SERVER}.vllm_max_model_len",
        broken=_too_short,
        cel=f"!$?({_SERVER}) || $({_SERVER}.vllm_max_model_len, 1) >= $(global_max_length, 0)",
        rule="must be at least global_max_length, or answers that the learner takes could not be made",
        way_out="raise it, or lower global_max_length",
    ),
    Rule(
        path=f"{_SERVER}.vllm_max_model_len",
        broken=_answer_does_not_fit,
        cel=f"!$?({_SERVER}) || $(rlhf.max_completion_length) < $({_SERVER}.vllm_max_model_len, 1)",
        rule="must hold a prompt and rlhf.max_completion_length more",
        way_out="raise it, or lower rlhf.max_completion_length",
    ),
    Rule(
        path=f"{_SERVER}.vllm_enable_lora",
        broken=lambda c: (s := _server(c)) is not None and s.vllm_enable_lora,
        cel=f"!$({_SERVER}.vllm_enable_lora)",
        rule="vLLM serves neither DoRA nor adapters of image encoders; weights travel merged",
        way_out="set it to false",
    ),
    Rule(
        path=f"{_SERVER}.vllm_max_lora_rank",
        broken=lambda c: (s := _server(c)) is not None and s.vllm_max_lora_rank is not None,
        cel=f"!$?({_SERVER}.vllm_max_lora_rank)",
        rule="no adapter is loaded by this server, so none has a rank",
        way_out="remove it; tuner.lora_rank is the learner's",
    ),
)

_REWARD_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path="rlhf.reward_weights",
        broken=_weights_do_not_pair,
        reads=("rlhf.reward_funcs",),
        cel="!$?(rlhf.reward_weights) || $(rlhf.reward_weights, []).size() == $(rlhf.reward_funcs, []).size()",
        rule="must be as long as rlhf.reward_funcs: one weight for each reward",
        way_out="add or remove weights",
    ),
    Rule(
        path="rlhf.reward_funcs",
        broken=_repeats_a_reward,
        cel=None,
        rule="every reward counts once",
        way_out="remove the one that stands twice, and raise the other's weight",
    ),
    Rule(
        path="custom.grpo.summary",
        broken=lambda c: _scores_summaries(c) and c.custom.grpo.summary is None,
        reads=("rlhf.reward_funcs",),
        cel=None,
        rule="rewards named summary.* score against the contract of summaries",
        way_out="write the section, or take other rewards",
    ),
    Rule(
        path="custom.use_summary",
        broken=lambda c: _scores_summaries(c) and not c.custom.use_summary,
        reads=("rlhf.reward_funcs",),
        cel=None,
        rule="rewards named summary.* need records with summaries",
        way_out="set it to true, or take other rewards",
    ),
    Rule(
        path="custom.assistant_prefix_format",
        broken=lambda c: _scores_summaries(c) and not c.custom.assistant_prefix_format,
        reads=("rlhf.reward_funcs",),
        cel=None,
        rule="rewards named summary.* need to know the header line",
        way_out='set it, such as "<DOMAIN={domain}>, <TASK={task}>"',
    ),
    Rule(
        path=_CHORD,
        broken=_chord_lacks,
        reads=tuple(f"{_CHORD}.{name}" for name in ("enabled", *_CHORD_KEYS)),
        cel=None,
        rule=f"needs all of {', '.join(_CHORD_KEYS)} when it is enabled",
        way_out="set those that are missing, or enabled to false",
    ),
)

_BATCH_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path="rlhf.steps_per_generation",
        broken=lambda c: c.rlhf is not None and None not in (c.rlhf.steps_per_generation, c.rlhf.generation_batch_size),
        cel="!$?(rlhf.steps_per_generation) || !$?(rlhf.generation_batch_size)",
        rule="follows from rlhf.generation_batch_size, so both cannot be set",
        way_out="remove one of the two",
    ),
    *(
        Rule(
            path=f"{_PLAN}.{name}",
            broken=lambda c, name=name: _plan_lacks(c, name),  # type: ignore[misc]
            reads=(f"{_PLAN}.enabled",),
            cel=f"!$({_PLAN}.enabled) || $?({_PLAN}.{name})",
            rule="a batch plan that is enabled needs it",
            way_out=f"set it, or {_PLAN}.enabled to false",
        )
        for name in ("per_device_train_batch_size", "unified_batch_size")
    ),
    Rule(
        path=f"{_PLAN}.per_device_eval_batch_size",
        broken=_evaluates_otherwise,
        reads=(f"{_PLAN}.per_device_train_batch_size", f"{_PLAN}.enabled"),
        cel=None,
        rule=f"must equal {_PLAN}.per_device_train_batch_size",
        way_out="remove it",
    ),
    *(
        Rule(
            path=f"{_PLAN}.{name}",
            broken=lambda c, name=name, key=key: (  # type: ignore[misc]
                (plan := _plan(c)) is not None and _training_differs(c, key, getattr(plan, name))
            ),
            reads=(f"training.{key}", f"{_PLAN}.enabled"),
            cel=None,
            rule=f"differs from training.{key}, which the plan sets",
            way_out=f"remove training.{key}, or set both to the same number",
        )
        for name, key in (
            ("unified_batch_size", "effective_batch_size"),
            ("per_device_train_batch_size", "per_device_train_batch_size"),
            ("per_device_train_batch_size", "per_device_eval_batch_size"),
        )
    ),
    Rule(
        path=f"{_PLAN}.unified_batch_size",
        broken=_generation_differs,
        reads=("rlhf.generation_batch_size", f"{_PLAN}.enabled"),
        cel=None,
        rule="differs from rlhf.generation_batch_size, which the plan sets",
        way_out="remove rlhf.generation_batch_size, or set both to the same number",
    ),
    Rule(
        path="training.gradient_accumulation_steps",
        broken=lambda c: _plan(c) is not None and c.training.gradient_accumulation_steps is not None,
        reads=(f"{_PLAN}.enabled",),
        cel=f"!$({_PLAN}.enabled) || !$?(training.gradient_accumulation_steps)",
        rule=f"follows from {_PLAN}",
        way_out=f"remove it, or set {_PLAN}.enabled to false",
    ),
    Rule(
        path="rlhf.steps_per_generation",
        broken=lambda c: _plan(c) is not None and c.rlhf is not None and c.rlhf.steps_per_generation is not None,
        reads=(f"{_PLAN}.enabled",),
        cel=f"!$({_PLAN}.enabled) || !$?(rlhf.steps_per_generation)",
        rule=f"follows from {_PLAN}",
        way_out=f"remove it, or set {_PLAN}.enabled to false",
    ),
)

GRPO_RULES: tuple[Rule[RunConfig], ...] = (*_MODE, *_SERVER_RULES, *_REWARD_RULES, *_BATCH_RULES)
"""Rules of every training YAML about GRPO. Those on batches that need the number of learner processes are in
grpo_batches."""
