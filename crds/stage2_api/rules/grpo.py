"""Rules of a GRPO run: when a training YAML is one, its rollout server, its rewards and CHORD.

Source: semantics sections 15.1, 15.2 and 15.4.
"""

from __future__ import annotations

from stage2_api.grpo import RolloutServer
from stage2_api.rules.grpo_batches import BATCH_RULES
from stage2_api.runconfig import RunConfig, server_size
from stage2_api.validation.validate import Rule
from stage2_api.vllm import ENGINE_OPTIONS, ONLINE_QUANTIZATION, foreign_options, is_quantized_by_checkpoint

SPEED_AND_MEMORY = (
    "may hold engine arguments of speed and memory only; stage2 sets what is served, where, to whom, by which code and"
    " how weights arrive"
)
UNPUSHABLE = (
    "quantization must be computed from the weights that a push brings; other kinds need a checkpoint of theirs"
)
_SERVER = "custom.extra.rollout_server"
_PLAN = "custom.grpo.batch_plan"
_FORCED = f"{_PLAN}.rollout_server"
_CHORD = "custom.grpo.chord"
_CHORD_KEYS = (
    "sft_per_device_train_batch_size", "mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley",
    "enable_phi_function",
)  # fmt: skip
_MATCHING = "custom.extra.rollout_matching"
_OF_BOTH = {"server", "sync"}  # sections of rollout_matching.vllm that GRPO uses too


def _sets_matching(config: RunConfig) -> bool:
    """Return whether keys of rollout matching are set that GRPO does not share."""
    own = config.custom.extra.rollout_matching
    return config.rlhf is not None and bool(own.model_fields_set - {"vllm"} or own.vllm.model_fields_set - _OF_BOTH)


def _sets_grpo_keys_without_rlhf(config: RunConfig) -> bool:
    custom = config.custom
    return config.rlhf is None and ("grpo" in custom.model_fields_set or custom.use_summary)


MODE_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path="rlhf",
        cel="$(custom.trainer_variant) != 'grpo' || $?(rlhf)",
        rule="custom.trainer_variant grpo needs it",
        way_out="write the section with at least rlhf.reward_funcs, or set custom.trainer_variant otherwise",
    ),
    Rule(
        path="custom.trainer_variant",
        cel="$(custom.trainer_variant) == 'grpo' || !$?(rlhf)",
        rule="rlhf belongs to another trainer",
        way_out="set custom.trainer_variant to grpo, or remove rlhf",
    ),
    Rule(
        path="rlhf.use_vllm",
        cel="!$?(rlhf) || $(rlhf.use_vllm)",
        rule="vLLM makes the rollouts of GRPO",
        way_out="set it to true",
    ),
    Rule(
        path="rlhf.vllm_mode",
        cel="!$?(rlhf) || $(rlhf.vllm_mode) == 'server'",
        rule="the rollouts of GRPO come from a server with its own GPUs",
        way_out="set it to server, and describe the server under custom.extra.rollout_server",
    ),
    Rule(
        path=_SERVER,
        cel=f"!$?(rlhf) || $(rlhf.vllm_mode) != 'server' || $?({_SERVER})",
        rule="rlhf.vllm_mode server needs the arguments of its server",
        way_out=(
            "write the section with at least vllm_tensor_parallel_size, vllm_data_parallel_size and vllm_max_model_len"
        ),
    ),
    Rule(
        path=_SERVER,
        cel=f"$?(rlhf) || !$?({_SERVER})",
        rule="belongs to GRPO, which rlhf turns on",
        way_out=f"remove it; {_MATCHING}.vllm describes the servers of rollout matching",
    ),
    Rule(
        path=_MATCHING,
        breaks=_sets_matching,
        rule="GRPO uses only its sections vllm.server and vllm.sync",
        way_out=f"remove the other keys; rlhf describes sampling, {_SERVER} the server",
    ),
    Rule(
        path="custom.grpo",
        breaks=_sets_grpo_keys_without_rlhf,
        reads=("custom.use_summary", "rlhf"),
        rule="custom.grpo and custom.use_summary belong to GRPO, which rlhf turns on",
        way_out="remove them, or write rlhf",
    ),
    Rule(
        path="training.packing",
        cel="!$?(rlhf) || !$(training.packing)",
        rule="GRPO pads its batches; it does not pack them",
        way_out="set it to false",
    ),
)
"""Rules of which keys belong to a GRPO run."""


def _server(config: RunConfig) -> RolloutServer | None:
    return config.custom.extra.rollout_server if config.rlhf is not None else None


def _misses(config: RunConfig, name: str) -> bool:
    return _server(config) is not None and server_size(config.custom, name) is None


def _contradicts(config: RunConfig, name: str) -> bool:
    server, plan = _server(config), config.custom.grpo.batch_plan
    own, forced = getattr(server, f"vllm_{name}", None), getattr(plan.rollout_server, f"force_vllm_{name}")
    return plan.enabled and None not in (own, forced) and own != forced


def _answer_does_not_fit(config: RunConfig) -> bool:
    server, rlhf = _server(config), config.rlhf
    return server is not None and rlhf is not None and rlhf.max_completion_length >= server.vllm_max_model_len


SERVER_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path=f"{_SERVER}.vllm_engine_kwargs",
        breaks=lambda c: (
            (s := c.custom.extra.rollout_server) is not None and bool(foreign_options(s.vllm_engine_kwargs))
        ),
        # Not in CEL, which cannot read the keys of a free mapping.
        rule=SPEED_AND_MEMORY,
        way_out=f"keep to {', '.join(sorted(ENGINE_OPTIONS))}",
    ),
    Rule(
        path=f"{_SERVER}.vllm_quantization",
        breaks=lambda c: (
            (s := c.custom.extra.rollout_server) is not None and is_quantized_by_checkpoint(s.passed_through())
        ),
        reads=(f"{_SERVER}.vllm_engine_kwargs",),
        # Not in CEL: vllm_engine_kwargs may hold it too.
        rule=UNPUSHABLE,
        way_out=f"set it to one of {', '.join(ONLINE_QUANTIZATION)}",
    ),
    *(
        Rule(
            path=f"{_SERVER}.vllm_{name}",
            breaks=lambda c, name=name: _misses(c, name),  # type: ignore[misc]
            reads=(f"{_FORCED}.force_vllm_{name}", f"{_PLAN}.enabled"),
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
            breaks=lambda c, name=name: _contradicts(c, name),  # type: ignore[misc]
            reads=(f"{_SERVER}.vllm_{name}", f"{_PLAN}.enabled"),
            rule=f"differs from {_SERVER}.vllm_{name}",
            way_out="remove one of the two",
        )
        for name in ("tensor_parallel_size", "data_parallel_size")
    ),
    Rule(
        path=f"{_SERVER}.vllm_max_model_len",
        breaks=lambda c: (s := _server(c)) is not None and s.vllm_max_model_len < (c.global_max_length or 0),
        cel=f"!$?({_SERVER}) || $({_SERVER}.vllm_max_model_len, 1) >= $(global_max_length, 0)",
        rule="must be at least global_max_length, so that the server can make every answer that the learner accepts",
        way_out="raise it, or lower global_max_length",
    ),
    Rule(
        path=f"{_SERVER}.vllm_max_model_len",
        breaks=_answer_does_not_fit,
        cel=f"!$?({_SERVER}) || $(rlhf.max_completion_length) < $({_SERVER}.vllm_max_model_len, 1)",
        rule="must exceed rlhf.max_completion_length, to leave room for a prompt",
        way_out="raise it, or lower rlhf.max_completion_length",
    ),
    Rule(
        path=f"{_SERVER}.vllm_enable_lora",
        breaks=lambda c: (s := _server(c)) is not None and s.vllm_enable_lora,
        cel=f"!$({_SERVER}.vllm_enable_lora)",
        rule="vLLM serves neither DoRA nor adapters of image encoders; the learner sends merged weights",
        way_out="set it to false",
    ),
    Rule(
        path=f"{_SERVER}.vllm_max_lora_rank",
        breaks=lambda c: (s := _server(c)) is not None and s.vllm_max_lora_rank is not None,
        cel=f"!$?({_SERVER}.vllm_max_lora_rank)",
        rule="this server loads no adapters",
        way_out="remove it; tuner.lora_rank is the learner's",
    ),
)
"""Rules of the rollout server of a GRPO run."""


def _scores(config: RunConfig, subject: str) -> bool:
    return config.rlhf is not None and any(name.startswith(f"{subject}.") for name in config.rlhf.reward_funcs)


def _chord_lacks(config: RunConfig) -> bool:
    chord = config.custom.grpo.chord
    return chord.enabled and any(getattr(chord, name) is None for name in _CHORD_KEYS)


REWARD_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path="rlhf.reward_weights",
        cel="!$?(rlhf.reward_weights) || $(rlhf.reward_weights, []).size() == $(rlhf.reward_funcs, []).size()",
        rule="must be as long as rlhf.reward_funcs: one weight per reward",
        way_out="add or remove weights",
    ),
    Rule(
        path="rlhf.reward_funcs",
        breaks=lambda c: c.rlhf is not None and len(set(c.rlhf.reward_funcs)) < len(c.rlhf.reward_funcs),
        rule="each reward may appear only once",
        way_out="remove the duplicate, and raise the other's weight",
    ),
    Rule(
        path="rlhf.reward_files",
        breaks=lambda c: c.rlhf is not None and not c.rlhf.files_named <= (c.rlhf.reward_files or {}).keys(),
        reads=("rlhf.reward_funcs",),
        rule="must have the text of each file that rlhf.reward_funcs names",
        way_out="`stage2 render JOB.yaml --job` prints the job with the files that are beside it",
    ),
    Rule(
        path="rlhf.reward_files",
        breaks=lambda c: c.rlhf is not None and not (c.rlhf.reward_files or {}).keys() <= c.rlhf.files_named,
        reads=("rlhf.reward_funcs",),
        rule="must have no file that rlhf.reward_funcs does not name",
        way_out="remove it, or name a reward as FILE.py:FUNCTION",
    ),
    Rule(
        path="custom.grpo.summary",
        breaks=lambda c: _scores(c, "summary") and c.custom.grpo.summary is None,
        reads=("rlhf.reward_funcs",),
        rule="rewards named summary.* need the format of the summaries",
        way_out="write the section, or choose other rewards",
    ),
    Rule(
        path="custom.use_summary",
        breaks=lambda c: _scores(c, "summary") and not c.custom.use_summary,
        reads=("rlhf.reward_funcs",),
        rule="rewards named summary.* need records with summaries",
        way_out="set it to true, or choose other rewards",
    ),
    Rule(
        path="custom.use_summary",
        breaks=lambda c: _scores(c, "objects") and c.custom.use_summary,
        reads=("rlhf.reward_funcs",),
        rule="rewards named objects.* need records with objects, which summaries replace",
        way_out="set it to false, or choose other rewards",
    ),
    Rule(
        path="custom.assistant_prefix_format",
        breaks=lambda c: _scores(c, "summary") and not c.custom.assistant_prefix_format,
        reads=("rlhf.reward_funcs",),
        rule="rewards named summary.* need the header line",
        way_out='set it, such as "<DOMAIN={domain}>, <TASK={task}>"',
    ),
    Rule(
        path=_CHORD,
        breaks=_chord_lacks,
        reads=tuple(f"{_CHORD}.{name}" for name in ("enabled", *_CHORD_KEYS)),
        rule=f"needs all of {', '.join(_CHORD_KEYS)} when it is enabled",
        way_out="set those that are missing, or enabled to false",
    ),
)
"""Rules of rewards, of summaries and of CHORD."""


GRPO_RULES: tuple[Rule[RunConfig], ...] = (*MODE_RULES, *SERVER_RULES, *REWARD_RULES, *BATCH_RULES)
"""Rules of every training YAML about GRPO."""
