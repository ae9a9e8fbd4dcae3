"""The reward on a summary's shape: its domain's table of categories and attributes (semantics section 15.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage2_api.grpo import SummaryCategory
from stage2_trainer.grpo.rewards.facts import counted, items
from stage2_trainer.grpo.rewards.sample import Sample

EXTRA_ATTRIBUTE, EXTRA_CATEGORY, EXTRA_KEY, NO_NUMBER = 0.35, 0.25, 0.30, 0.60


def schema_tree(sample: Sample) -> float:
    """Mean completeness of the items, less what the table does not know; from -1 to 1."""
    if sample.scored is None:
        return 0.0
    answer, _ = sample.scored
    table = {category.name: category for category in sample.domain.categories}
    category_key = sample.agreed.summary.keys.category
    found = items(sample, answer)
    known = [(table[item[category_key]], _attributes(sample, item)) for item in found if item[category_key] in table]
    complete = sum(_completeness(category, attributes) for category, attributes in known) / max(len(known), 1)
    penalty = (
        EXTRA_ATTRIBUTE * sum(len(attributes - _allowed(category)) for category, attributes in known)
        + EXTRA_CATEGORY * len({item[category_key] for item in found} - set(table))
        + EXTRA_KEY * len(set(answer) - _top_keys(sample))
        + NO_NUMBER * _has_no_number(sample, found)
    )
    return max(-1.0, min(1.0, complete - penalty))


def _completeness(category: SummaryCategory, attributes: set[str]) -> float:
    """Share of what an item must have that it has; 1 where it must have nothing."""
    demands = [{name} for name in category.required] + [set(group) for group in category.any_of]
    return sum(bool(demand & attributes) for demand in demands) / len(demands) if demands else 1.0


def _allowed(category: SummaryCategory) -> set[str]:
    return {*category.required, *category.allowed, *(name for group in category.any_of for name in group)}


def _attributes(sample: Sample, item: Mapping[str, Any]) -> set[str]:
    return set(item) - {sample.agreed.summary.keys.category}


def _top_keys(sample: Sample) -> set[str]:
    keys, domain = sample.agreed.summary.keys, sample.domain
    return {keys.items, *([keys.notes] if domain.notes else []), *([keys.groups] if domain.groups else [])}


def _has_no_number(sample: Sample, found: list[Mapping[str, Any]]) -> bool:
    """Whether an attribute that must be a number is something else in any item."""
    values = (item[name] for item in found for name in sample.domain.digit_attributes if name in item)
    return any(not said.isdecimal() for value in values for said, _ in counted(value))
