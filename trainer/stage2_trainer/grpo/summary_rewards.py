"""Rewards on summaries (semantics section 15.6): those on the form of an answer, then those on its content.

Rewards on content take the answer's and the record's summary; where an answer has none that counts, they score 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from stage2_api.grpo import SummaryCategory
from stage2_trainer.grpo.summaries import (
    HEADER_LINES,
    SummarySample,
    by_category,
    canonical,
    counted,
    facts,
    items,
    notes,
    texts,
)

Json = Mapping[str, Any]
_ANY_HEADER = re.compile(r"<DOMAIN=[A-Z]+>, <TASK=[A-Z]+>")
_TASK = "<TASK="
FN_WEIGHT = 1.0
TEXT_PENALTY, FREE_TEXTS = 0.10, 2
LONGEST_CHILD = 32
_FREE_VALUE = re.compile(r"\d+|.*=.*", re.DOTALL)
EXTRA_ATTRIBUTE, EXTRA_CATEGORY, EXTRA_KEY, NO_NUMBER = 0.35, 0.25, 0.30, 0.60


def format_(sample: SummarySample) -> float:
    """1 for two lines, a header of any domain and a line that ends with `}`; for irrelevant images, the exact text."""
    if sample.irrelevant:
        return float(sample.text == sample.contract.summary.irrelevant.text)
    lines = sample.lines
    return float(len(lines) == HEADER_LINES and _is_header(sample, lines[0]) and lines[1].strip().endswith("}"))


def header(sample: SummarySample) -> float:
    """1 for exactly the header of the record's domain, else 0; -1 for a header about an irrelevant image."""
    if sample.irrelevant:
        return -1.0 if _is_header(sample, sample.lines[0]) or _TASK in sample.text else 0.0
    return float(sample.lines[0] == sample.contract.header(sample.domain))


def strict(sample: SummarySample) -> float:
    """-1 unless the answer is two lines with the right header; 0 for irrelevant images."""
    return 0.0 if sample.irrelevant or sample.has_header else -1.0


def parse(sample: SummarySample) -> float:
    """-1 unless there is a second line of valid JSON without forbidden keys; 0 for irrelevant images."""
    line = sample.second_line
    return 0.0 if sample.irrelevant or (line is not None and sample.allowed(line)) else -1.0


def no_dup_keys(sample: SummarySample) -> float:
    """-1 where a key occurs twice in one mapping of the second line, however deep."""
    line = sample.second_line
    return -1.0 if not sample.irrelevant and line is not None and line.repeats_keys else 0.0


def dataset(sample: SummarySample) -> float:
    """1 where the header names the record's domain and the strict JSON line is there."""
    return float(not sample.irrelevant and sample.strict is not None)


def _is_header(sample: SummarySample, line: str) -> bool:
    """Whether a line is a header of any domain, known or not, in the general form or in the contract's own."""
    contract = sample.contract
    known = {contract.header(domain) for domain in contract.summary.domains}
    return _ANY_HEADER.fullmatch(line) is not None or line in known


def content_eq(sample: SummarySample, *summaries: Json) -> float:
    """1 where answer and reference are equal, whatever the order of keys, items and notes."""
    answer, truth = summaries
    return float(canonical(sample, answer) == canonical(sample, truth))


def content_f1(sample: SummarySample, *summaries: Json) -> float:
    """F1 over facts with their counts."""
    answer, truth = (facts(sample, summary) for summary in summaries)
    total = answer.total() + truth.total()
    return 2 * (answer & truth).total() / total if total else 1.0


def content_structured_tversky(sample: SummarySample, *summaries: Json) -> float:
    """Tversky index over facts: an extra one costs `tversky_fp` of the domain, a missing one 1."""
    ignored = set(sample.domain.tversky_ignored)
    answer, truth = (_without_ignored(facts(sample, summary), ignored) for summary in summaries)
    overlap = (answer & truth).total()
    extra, missing = answer.total() - overlap, truth.total() - overlap
    whole = overlap + sample.domain.tversky_fp * extra + FN_WEIGHT * missing
    return overlap / whole if whole else 1.0


def category_recall(sample: SummarySample, *summaries: Json) -> float:
    """Share of the reference's categories that the answer names; 1 where neither has any."""
    answer, truth = (by_category(sample, summary) for summary in summaries)
    return _recall(truth, answer) if truth else float(not answer)


def category_f1(sample: SummarySample, *summaries: Json) -> float:
    """F1 over the sets of categories; 1 where neither has any."""
    answer, truth = (set(by_category(sample, summary)) for summary in summaries)
    total = len(answer) + len(truth)
    return 2 * len(answer & truth) / total if total else 1.0


def attr_key_recall(sample: SummarySample, *summaries: Json) -> float:
    """Mean over the reference's categories of the share of their attributes in the answer, texts left out."""
    ignored = set(sample.contract.summary.text_attributes)
    answer, truth = (by_category(sample, summary) for summary in summaries)
    wanted = {category: set(attributes) - ignored for category, attributes in truth.items()}
    return _mean([_recall(keys, answer.get(category, ())) for category, keys in wanted.items() if keys])


def attr_path_recall(sample: SummarySample, *summaries: Json) -> float:
    """Mean over common categories of the share of attribute/value pairs, of attributes with a closed set of values.

    Free text (digits only, with `=`, or long) is left out; without any pair the answer scores 0.
    """
    answer, truth = (by_category(sample, summary) for summary in summaries)
    pairs = [(_paths(sample, truth[name]), _paths(sample, answer[name])) for name in truth if name in answer]
    return _mean([_recall(wanted, found) for wanted, found in pairs if wanted])


def text_bbu(sample: SummarySample, *summaries: Json) -> float:
    """Share of the texts that the answer has, minus 0.1 for each text beyond two extra ones; from -1 to 1."""
    answer, truth = (texts(sample, summary) for summary in summaries)
    recall = (answer & truth).total() / truth.total() if truth else 0.0
    extra = max(0, len(answer) - len(truth) - FREE_TEXTS)
    return max(-1.0, min(1.0, recall - TEXT_PENALTY * extra))


def notes_bbu(sample: SummarySample, *summaries: Json) -> float:
    """Share of the notes that the answer has; -1 for notes about a record that has none."""
    answer, truth = (notes(sample, summary) for summary in summaries)
    if not truth:
        return -1.0 if answer else 0.0
    return (answer & truth).total() / truth.total()


def notes_presence(sample: SummarySample, *summaries: Json) -> float:
    """1 where reference and answer both have notes."""
    return float(all(one.get(sample.contract.summary.keys.notes) for one in summaries))


def group_stats_presence(sample: SummarySample, *summaries: Json) -> float:
    """1 where reference and answer both have group counts."""
    return float(all(one.get(sample.contract.summary.keys.groups) for one in summaries))


def _without_ignored(found: Counter[tuple[str, ...]], ignored: set[str]) -> Counter[tuple[str, ...]]:
    """Return the facts without ignored attributes, and without notes where their key is ignored."""
    return Counter({fact: count for fact, count in found.items() if not ignored & {fact[0], *fact[2:3]}})


def _paths(sample: SummarySample, attributes: dict[str, list[Any]]) -> set[str]:
    stable = (name for name in sample.contract.summary.stable_attributes if name in attributes)
    return {
        f"{name}/{one}"
        for name in stable
        for value in attributes[name]
        for one, _ in counted(value)
        if len(one) <= LONGEST_CHILD and not _FREE_VALUE.fullmatch(one)
    }


def _recall(wanted: Collection[str], found: Collection[str]) -> float:
    return sum(1 for one in wanted if one in found) / len(wanted)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def schema_tree(sample: SummarySample, *summaries: Json) -> float:
    """Mean completeness of the items, minus penalties for unknown parts; from -1 to 1."""
    answer, _ = summaries
    table = {category.name: category for category in sample.domain.categories}
    category_key = sample.contract.summary.keys.category
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
    """Share of the required attributes that an item has; 1 where none is required."""
    demands = [{name} for name in category.required] + [set(group) for group in category.any_of]
    return sum(bool(demand & attributes) for demand in demands) / len(demands) if demands else 1.0


def _allowed(category: SummaryCategory) -> set[str]:
    return {*category.required, *category.allowed, *(name for group in category.any_of for name in group)}


def _attributes(sample: SummarySample, item: Mapping[str, Any]) -> set[str]:
    return set(item) - {sample.contract.summary.keys.category}


def _top_keys(sample: SummarySample) -> set[str]:
    keys, domain = sample.contract.summary.keys, sample.domain
    return {keys.items, *([keys.notes] if domain.notes else []), *([keys.groups] if domain.groups else [])}


def _has_no_number(sample: SummarySample, found: list[Mapping[str, Any]]) -> bool:
    """Whether an attribute that must be a number is something else in any item."""
    values = (item[name] for item in found for name in sample.domain.digit_attributes if name in item)
    return any(not one.isdecimal() for value in values for one, _ in counted(value))


_FORM: Sequence[Callable[[SummarySample], float]] = (format_, header, strict, parse, no_dup_keys, dataset)
_CONTENT: Sequence[Callable[[SummarySample, Json, Json], float]] = (
    content_eq, content_f1, content_structured_tversky, category_recall, category_f1, attr_key_recall,
    attr_path_recall, schema_tree, text_bbu, notes_bbu, notes_presence, group_stats_presence,
)  # fmt: skip


def summary_rewards() -> dict[str, Callable[[SummarySample], float]]:
    """Return the rewards by name; records that are no summaries score 0."""
    functions = {function.__name__.removesuffix("_"): function for function in _FORM}
    functions |= {function.__name__: _on_content(function) for function in _CONTENT}
    return {f"summary.{name}": _unless_dense(function) for name, function in functions.items()}


def _on_content(function: Callable[[SummarySample, Json, Json], float]) -> Callable[[SummarySample], float]:
    """Score answers without a summary that counts with 0."""
    return lambda sample: 0.0 if sample.scored is None else function(sample, *sample.scored)


def _unless_dense(function: Callable[[SummarySample], float]) -> Callable[[SummarySample], float]:
    """Score records that are no summaries with 0."""
    return lambda sample: 0.0 if sample.dense else function(sample)
