"""Rules of when a training YAML is a GRPO run, and of which keys only such a run has.

Source: semantics sections 15.1 and 15.2.
"""

from __future__ import annotations

from stage2_api.runconfig import RunConfig
from stage2_api.validation.rule import Rule

_SERVER = "custom.extra.rollout_server"
_MATCHING = "custom.extra.rollout_matching"
_OF_BOTH = {"server", "sync"}  # sections of rollout_matching.vllm that GRPO uses too


def _sets_matching(config: RunConfig) -> bool:
    """Tell whether keys of rollout matching are set beside those that GRPO shares with it."""
    own = config.custom.extra.rollout_matching
    return config.rlhf is not None and bool(own.model_fields_set - {"vllm"} or own.vllm.model_fields_set - _OF_BOTH)


def _gives_grpo_keys_alone(config: RunConfig) -> bool:
    custom = config.custom
    return config.rlhf is None and ("grpo" in custom.model_fields_set or custom.use_summary)


MODE_RULES: tuple[Rule[RunConfig], ...] = (
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
        broken=lambda c: c.rlhf is not None and c.rlhf.vllm_mode == "server" and c.custom.extra.rollout_server is None,
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
"""Rules of which keys belong to a GRPO run."""
