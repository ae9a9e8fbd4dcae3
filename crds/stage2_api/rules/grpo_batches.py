"""Rules of a GRPO run's batches: what the batch plan sets, and whether rounds, groups and micro-batches fit.

Source: semantics sections 15.1 and 15.2.
"""

from __future__ import annotations

from stage2_api.errors import Problem
from stage2_api.grpo import BatchPlan
from stage2_api.runconfig import RunConfig
from stage2_api.validation.validate import Rule

_PER_DEVICE = "training.per_device_train_batch_size"
_PLAN = "custom.grpo.batch_plan"


def _plan(config: RunConfig) -> BatchPlan | None:
    plan = config.custom.grpo.batch_plan
    return plan if plan.enabled else None


def _training_differs(config: RunConfig, key: str, wanted: int | None) -> bool:
    """Return whether a key of `training` was set to another value than the plan's."""
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


BATCH_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path="rlhf.steps_per_generation",
        cel="!$?(rlhf.steps_per_generation) || !$?(rlhf.generation_batch_size)",
        rule="follows from rlhf.generation_batch_size, so both cannot be set",
        way_out="remove one of the two",
    ),
    *(
        Rule(
            path=f"{_PLAN}.{name}",
            cel=f"!$({_PLAN}.enabled) || $?({_PLAN}.{name})",
            rule="an enabled batch plan needs it",
            way_out=f"set it, or {_PLAN}.enabled to false",
        )
        for name in ("per_device_train_batch_size", "unified_batch_size")
    ),
    Rule(
        path=f"{_PLAN}.per_device_eval_batch_size",
        breaks=_evaluates_otherwise,
        reads=(f"{_PLAN}.per_device_train_batch_size", f"{_PLAN}.enabled"),
        rule=f"must equal {_PLAN}.per_device_train_batch_size",
        way_out="remove it",
    ),
    *(
        Rule(
            path=f"{_PLAN}.{name}",
            breaks=lambda c, name=name, key=key: (  # type: ignore[misc]
                (plan := _plan(c)) is not None and _training_differs(c, key, getattr(plan, name))
            ),
            reads=(f"training.{key}", f"{_PLAN}.enabled"),
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
        breaks=_generation_differs,
        reads=("rlhf.generation_batch_size", f"{_PLAN}.enabled"),
        rule="differs from rlhf.generation_batch_size, which the plan sets",
        way_out="remove rlhf.generation_batch_size, or set both to the same number",
    ),
    Rule(
        path="training.gradient_accumulation_steps",
        cel=f"!$({_PLAN}.enabled) || !$?(training.gradient_accumulation_steps)",
        rule=f"follows from {_PLAN}",
        way_out=f"remove it, or set {_PLAN}.enabled to false",
    ),
    Rule(
        path="rlhf.steps_per_generation",
        cel=f"!$({_PLAN}.enabled) || !$?(rlhf.steps_per_generation)",
        rule=f"follows from {_PLAN}",
        way_out=f"remove it, or set {_PLAN}.enabled to false",
    ),
)
"""Rules of batches that hold for any number of learner processes; `batch_problems` has the others."""


def batch_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Return what does not fit in `world_size` learner processes."""
    assert config.rlhf is not None, "a GRPO run"
    batches = config.grpo_batches(world_size)
    path = _path_of_round(config)
    divisors = {
        f"{_PER_DEVICE} ({batches.per_device}) times learner processes ({world_size})": batches.micro_batch,
        "rlhf.num_generations": batches.num_generations,
    }
    return [
        Problem(
            path,
            batches.generation,
            f"must be a multiple of {name}, which is {divisor}",
            f"set it to {-(-batches.generation // divisor) * divisor}, or change {name.partition(' ')[0]}",
        )
        for name, divisor in divisors.items()
        if batches.generation % divisor
    ]


def round_problems(config: RunConfig, records: int, world_size: int) -> list[Problem]:
    """Return that a round of rollouts in `world_size` learner processes needs more records: no step would begin."""
    batches = config.grpo_batches(world_size)
    if records >= batches.prompts:
        return []
    rule = f"a round of rollouts asks about {batches.prompts} records, and custom.train_jsonl has {records}"
    way_out = "lower it, raise rlhf.num_generations, or add records"
    return [Problem(_path_of_round(config), batches.generation, rule, way_out)]


def _path_of_round(config: RunConfig) -> str:
    """Return the key that sets the number of answers in a round of rollouts."""
    if config.custom.grpo.batch_plan.enabled:
        return f"{_PLAN}.unified_batch_size"
    return "rlhf.generation_batch_size" if config.rlhf and config.rlhf.generation_batch_size else _PER_DEVICE
