"""A summary as facts with counts, which is what the content rewards compare (semantics section 15.5)."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from stage2_trainer.grpo.rewards.sample import Sample

Fact = tuple[str, ...]
Facts = Counter[Fact]
_DIGITS = re.compile(r"\d+")


def items(sample: Sample, summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the items that have a category."""
    keys = sample.agreed.summary.keys
    found = summary.get(keys.items)
    return [one for one in found if _is_item(one, keys.category)] if isinstance(found, list) else []


def by_category(sample: Sample, summary: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return each category's attributes with all values that they have, over its items."""
    category = sample.agreed.summary.keys.category
    found: dict[str, dict[str, list[Any]]] = {}
    for item in items(sample, summary):
        attributes = found.setdefault(item[category], {})
        for name, value in item.items():
            if name != category:
                attributes.setdefault(name, []).append(value)
    return found


def counted(value: Any) -> Iterator[tuple[str, float]]:
    """Return what a value says and how often: counts of a mapping, 1 for each of a list, 1 for a scalar."""
    if isinstance(value, Mapping):
        yield from ((str(key), count) for key, count in value.items() if is_number(count) and count > 0)
    elif isinstance(value, list):
        yield from ((_plain(one), 1) for one in value)
    else:
        yield _plain(value), 1


def notes(sample: Sample, summary: Mapping[str, Any]) -> Counter[str]:
    """Return the notes without white space."""
    found = summary.get(sample.agreed.summary.keys.notes)
    return Counter(without_space(str(note)) for note in found) if isinstance(found, list) else Counter()


def facts(sample: Sample, summary: Mapping[str, Any]) -> Facts:
    """Return everything a summary says: (items, category, attribute, value), (notes, text), (groups, id), counted."""
    contract = sample.agreed.summary
    found: Facts = Counter()
    for category, attributes in by_category(sample, summary).items():
        for name, values in attributes.items():
            for value in values:
                for said, count in counted(value):
                    found[(contract.keys.items, category, name, _normal(sample, name, said))] += count  # type: ignore[assignment]
    for note, count in notes(sample, summary).items():
        found[(contract.keys.notes, note)] += count
    groups = summary.get(contract.keys.groups)
    for name, number in groups.items() if isinstance(groups, Mapping) else ():
        if is_number(number) and number > 0:
            found[(contract.keys.groups, _first_digits(str(name)))] += number
    return found


def texts(sample: Sample, summary: Mapping[str, Any]) -> Counter[str]:
    """Return text read from the image, counted: without white space, full-width marks as plain ones, in capitals."""
    found: Counter[str] = Counter()
    for attributes in by_category(sample, summary).values():
        for name in sample.agreed.summary.text_attributes:
            for value in attributes.get(name, ()):
                for said, count in counted(value):
                    found[without_space(unicodedata.normalize("NFKC", said)).upper()] += int(count)
    return found


def canonical(sample: Sample, summary: Mapping[str, Any]) -> str:
    """Return a summary as text that neither the order of keys nor that of items and notes changes."""
    keys = sample.agreed.summary.keys
    sorted_lists = {
        key: sorted(summary[key], key=lambda one: json.dumps(one, sort_keys=True, ensure_ascii=False))
        for key in (keys.items, keys.notes)
        if isinstance(summary.get(key), list)
    }
    return json.dumps({**summary, **sorted_lists}, sort_keys=True, ensure_ascii=False)


def is_number(value: object) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def without_space(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


def _normal(sample: Sample, attribute: str, value: str) -> str:
    contract = sample.agreed.summary
    if attribute in contract.text_attributes:
        return without_space(value)
    return _first_digits(value) if attribute in contract.number_attributes else value


def _first_digits(text: str) -> str:
    found = _DIGITS.search(text)
    return found[0] if found else text


def _is_item(value: object, category: str) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get(category), str)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
