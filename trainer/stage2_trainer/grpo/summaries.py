"""Summaries: the contract of a run, and an answer and its record read by it.

Source: semantics sections 15.4 (outputs) and 15.6 (strict JSON line).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stage2_api.errors import refused
from stage2_api.grpo import Summary, SummaryDomain

Fact = tuple[str, ...]
Facts = Counter[Fact]
_DIGITS = re.compile(r"\d+")
DENSE = "dense"
HEADER_LINES = 2  # the header and the JSON


@dataclass(frozen=True)
class Contract:
    """The contract of summaries: its vocabulary, and the header line with `{domain}` and `{task}`."""

    summary: Summary
    header_format: str

    def header(self, domain: SummaryDomain) -> str:
        """Return the header line that answers about a domain begin with."""
        return self.header_format.format(domain=domain.name, task=self.summary.task)

    def domain_of(self, template: object) -> SummaryDomain | None:
        """Return the domain of records with this `_fusion_template`; None if there is none."""
        return next((domain for domain in self.summary.domains if domain.template == template), None)


@dataclass(frozen=True)
class JsonLine:
    """A line of JSON: its object, or None for anything else, and whether a mapping has a key twice."""

    value: Mapping[str, Any] | None
    repeats_keys: bool


@dataclass(frozen=True)
class SummarySample:
    """An answer and the metadata of its record, both read as summaries. text: the answer without special tokens."""

    text: str
    metadata: Mapping[str, Any]
    contract: Contract

    @cached_property
    def lines(self) -> list[str]:
        """The answer's lines."""
        return self.text.split("\n")

    @cached_property
    def irrelevant(self) -> bool:
        """Whether the right answer is the fixed text for irrelevant images."""
        return bool(self.metadata.get("_fusion_source") == self.contract.summary.irrelevant.source)

    @cached_property
    def dense(self) -> bool:
        """Whether the record is no summary; every reward of summaries is 0."""
        return bool(self.metadata.get("_fusion_mode") == DENSE)

    @cached_property
    def domain(self) -> SummaryDomain:
        """The record's domain. Raises ConfigError where its template belongs to none."""
        template = self.metadata.get("_fusion_template")
        found = self.contract.domain_of(template)
        if found is None:
            known = ", ".join(domain.template for domain in self.contract.summary.domains)
            rule = f"must be the template of a domain: {known}"
            way_out = "correct the record, or add the domain to custom.grpo.summary.domains"
            raise refused("metadata._fusion_template", template, rule, way_out)
        return found

    @cached_property
    def has_header(self) -> bool:
        """Whether the answer is two lines, the first exactly the header of the record's domain."""
        return len(self.lines) == HEADER_LINES and self.lines[0] == self.contract.header(self.domain)

    @cached_property
    def second_line(self) -> JsonLine | None:
        """The second line as JSON; None without one."""
        return read_line(self.lines[1].strip()) if len(self.lines) >= HEADER_LINES else None

    @cached_property
    def strict(self) -> Mapping[str, Any] | None:
        """The object of the strict JSON line: two lines, the right header, valid JSON; None if it is not there."""
        line = self.second_line
        return line.value if self.has_header and line is not None and self.allowed(line) else None

    @cached_property
    def truth(self) -> Mapping[str, Any]:
        """The record's own summary. Raises ConfigError where it is none."""
        reference = str(self.metadata.get("summary_ref", ""))
        line = read_line(reference)
        if line.value is None:
            rule = "must be a summary as one line of JSON"
            raise refused("metadata.summary_ref", reference, rule, "correct the record")
        return line.value

    @cached_property
    def scored(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """The answer's and the record's summary; None where content scores 0.

        That is without the strict JSON line, for irrelevant images, and with a part that the domain does not have.
        """
        if self.irrelevant or self.strict is None:
            return None
        domain, keys = self.domain, self.contract.summary.keys
        foreign = {name for name, there in ((keys.notes, domain.notes), (keys.groups, domain.groups)) if not there}
        return None if foreign & (set(self.strict) | set(self.truth)) else (self.strict, self.truth)

    def allowed(self, line: JsonLine) -> bool:
        """Whether a line is an object without forbidden keys."""
        return line.value is not None and not set(self.contract.summary.keys.forbidden) & set(line.value)


def read_line(text: str) -> JsonLine:
    """Read one line of JSON."""
    repeated = False

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        repeated = repeated or max(Counter(key for key, _ in pairs).values(), default=0) > 1
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        return JsonLine(None, repeated)
    return JsonLine(value if isinstance(value, dict) else None, repeated)


def items(sample: SummarySample, summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the items that have a category."""
    keys = sample.contract.summary.keys
    found = summary.get(keys.items)
    return [one for one in found if _is_item(one, keys.category)] if isinstance(found, list) else []


def by_category(sample: SummarySample, summary: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return each category's attributes with all values that they have, over its items."""
    category = sample.contract.summary.keys.category
    found: dict[str, dict[str, list[Any]]] = {}
    for item in items(sample, summary):
        attributes = found.setdefault(item[category], {})
        for name, value in item.items():
            if name != category:
                attributes.setdefault(name, []).append(value)
    return found


def counted(value: Any) -> Iterator[tuple[str, float]]:
    """Yield the values that an attribute has, counted: counts of a mapping, 1 for each of a list, 1 for a scalar."""
    if isinstance(value, Mapping):
        yield from ((str(key), count) for key, count in value.items() if is_number(count) and count > 0)
    elif isinstance(value, list):
        yield from ((_plain(one), 1) for one in value)
    else:
        yield _plain(value), 1


def notes(sample: SummarySample, summary: Mapping[str, Any]) -> Counter[str]:
    """Return the notes without white space."""
    found = summary.get(sample.contract.summary.keys.notes)
    return Counter(without_space(str(note)) for note in found) if isinstance(found, list) else Counter()


def facts(sample: SummarySample, summary: Mapping[str, Any]) -> Facts:
    """Return all facts of a summary, counted: (items, category, attribute, value), (notes, text), (groups, id)."""
    contract = sample.contract.summary
    found: Facts = Counter()
    for category, attributes in by_category(sample, summary).items():
        for name, values in attributes.items():
            for value in values:
                for text, count in counted(value):
                    found[(contract.keys.items, category, name, _normal(sample, name, text))] += count  # type: ignore[assignment]
    for note, count in notes(sample, summary).items():
        found[(contract.keys.notes, note)] += count
    groups = summary.get(contract.keys.groups)
    for name, number in groups.items() if isinstance(groups, Mapping) else ():
        if is_number(number) and number > 0:
            found[(contract.keys.groups, _first_digits(str(name)))] += number
    return found


def texts(sample: SummarySample, summary: Mapping[str, Any]) -> Counter[str]:
    """Return text read from the image, counted: without white space, full-width marks as plain ones, in capitals."""
    found: Counter[str] = Counter()
    for attributes in by_category(sample, summary).values():
        for name in sample.contract.summary.text_attributes:
            for value in attributes.get(name, ()):
                for text, count in counted(value):
                    found[without_space(unicodedata.normalize("NFKC", text)).upper()] += int(count)
    return found


def canonical(sample: SummarySample, summary: Mapping[str, Any]) -> str:
    """Return a summary as text that neither the order of keys nor that of items and notes changes."""
    keys = sample.contract.summary.keys
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


def _normal(sample: SummarySample, attribute: str, value: str) -> str:
    contract = sample.contract.summary
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
