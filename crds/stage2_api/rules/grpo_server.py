"""Rules of a GRPO run's rollout server: its sizes, its lengths, and what it cannot load.

Source: semantics sections 15.1 and 15.2.
"""

from __future__ import annotations

from stage2_api.engine_options import ENGINE_OPTIONS, foreign_options
from stage2_api.grpo import RolloutServer
from stage2_api.runconfig import RunConfig
from stage2_api.validation.rule import Rule

_SERVER = "custom.extra.rollout_server"
_PLAN = "custom.grpo.batch_plan"
_FORCED = f"{_PLAN}.rollout_server"


def _server(config: RunConfig) -> RolloutServer | None:
    return config.custom.extra.rollout_server if config.rlhf is not None else None


def _forced(config: RunConfig, name: str) -> int | None:
    """Return the size that an enabled batch plan forces on the server."""
    plan = config.custom.grpo.batch_plan
    size: int | None = getattr(plan.rollout_server, f"force_vllm_{name}")
    return size if plan.enabled else None


def _misses(config: RunConfig, name: str) -> bool:
    server = _server(config)
    return server is not None and getattr(server, f"vllm_{name}") is None and _forced(config, name) is None


def _contradicts(config: RunConfig, name: str) -> bool:
    server = _server(config)
    given = server and getattr(server, f"vllm_{name}")
    return bool(given and _forced(config, name) not in (None, given))


def _too_short(config: RunConfig) -> bool:
    server = _server(config)
    return server is not None and server.vllm_max_model_len < (config.global_max_length or 0)


def _answer_does_not_fit(config: RunConfig) -> bool:
    server, rlhf = _server(config), config.rlhf
    return server is not None and rlhf is not None and rlhf.max_completion_length >= server.vllm_max_model_len


def _sets_foreign_options(config: RunConfig) -> bool:
    server = config.custom.extra.rollout_server
    return server is not None and bool(foreign_options(server.vllm_engine_kwargs))


SERVER_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path=f"{_SERVER}.vllm_engine_kwargs",
        broken=_sets_foreign_options,
        cel=None,  # a free mapping, whose keys CEL cannot see
        rule=(
            "may hold engine arguments of speed and memory only; what is served, where, to whom, by which code and how"
            " weights arrive is stage2's"
        ),
        way_out=f"keep to {', '.join(sorted(ENGINE_OPTIONS))}",
    ),
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
"""Rules of the rollout server of a GRPO run."""
