"""Rewards by name: those of this package, and those that other packages add by an entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.grpo.rewards import summary
from stage2_trainer.grpo.rewards.sample import Sample

ENTRY_POINTS = "stage2.rewards"

Function = Callable[[Sample], float]

_FORM: Mapping[str, Function] = {
    "format": summary.format_,
    "header": summary.header,
    "strict": summary.strict,
    "parse": summary.parse,
    "no_dup_keys": summary.no_dup_keys,
    "dataset": summary.dataset,
}
_CONTENT: Mapping[str, Callable[[Sample, summary.Json, summary.Json], float]] = {
    "content_eq": summary.content_eq,
    "content_f1": summary.content_f1,
    "content_structured_tversky": summary.content_structured_tversky,
    "category_recall": summary.category_recall,
    "category_f1": summary.category_f1,
    "attr_key_recall": summary.attr_key_recall,
    "attr_path_recall": summary.attr_path_recall,
    "schema_tree": summary.schema_tree,
    "text_bbu": summary.text,
    "notes_bbu": summary.notes_recall,
    "notes_presence": summary.notes_presence,
    "group_stats_presence": summary.group_stats_presence,
}


@dataclass(frozen=True)
class Reward:
    """A reward with its name and weight. `function` is pure."""

    name: str
    weight: float
    function: Function

    def __call__(self, sample: Sample) -> float:
        """Return the score of one sample, without the weight."""
        return float(self.function(sample))


@dataclass(frozen=True)
class Scores:
    """The scores of one sample by reward, and their weighted sum."""

    by_name: Mapping[str, float]
    total: float


def known_rewards() -> dict[str, Function]:
    """Return the rewards of this package by name."""
    functions = {**_FORM, **{name: _on_content(function) for name, function in _CONTENT.items()}}
    return {f"summary.{name}": _unless_dense(function) for name, function in functions.items()}


def load_rewards(names: Sequence[str], weights: Sequence[float]) -> list[Reward]:
    """Return the rewards of a run. Raises ConfigError for names that do not exist, or that two packages have."""
    own, others = known_rewards(), {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    known = ", ".join(sorted({*own, *others}))
    problems = [
        Problem(f"rlhf.reward_funcs[{index}]", name, f"must be one of {known}", _way_out(name))
        for index, name in enumerate(names)
        if name not in own and name not in others
    ]
    problems += [
        Problem(f"entry point {ENTRY_POINTS}", name, f"names a reward of stage2 ({others[name].value})", "rename it")
        for name in sorted(set(own) & set(others))
    ]
    if problems:
        raise ConfigError(problems)
    return [
        Reward(name, weight, own[name] if name in own else _imported(others[name]))
        for name, weight in zip(names, weights, strict=True)
    ]


def score(rewards: Sequence[Reward], sample: Sample) -> Scores:
    """Return the scores of one sample."""
    by_name = {reward.name: reward(sample) for reward in rewards}
    return Scores(by_name, sum(reward.weight * by_name[reward.name] for reward in rewards))


def _imported(entry: EntryPoint) -> Function:
    try:
        function: Function = entry.load()
    except (ImportError, AttributeError) as error:
        rule = f"cannot be imported from {entry.value} ({error})"
        way_out = "repair the package that adds it"
        raise ConfigError([Problem("rlhf.reward_funcs", entry.name, rule, way_out)]) from error
    return function


def _on_content(function: Callable[[Sample, summary.Json, summary.Json], float]) -> Function:
    """Score answers without a summary that counts with 0."""
    return lambda sample: 0.0 if sample.scored is None else function(sample, *sample.scored)


def _unless_dense(function: Function) -> Function:
    """Score records that are no summaries with 0."""
    return lambda sample: 0.0 if sample.dense else function(sample)


def _way_out(name: str) -> str:
    return f"correct it, or install the package that adds {name} under the entry point {ENTRY_POINTS}"
