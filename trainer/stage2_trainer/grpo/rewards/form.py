"""Rewards on the form of a summary: two lines, the header, valid JSON (semantics section 15.5)."""

from __future__ import annotations

import re

from stage2_trainer.grpo.rewards.sample import HEADER_LINES, Sample

_ANY_HEADER = re.compile(r"<DOMAIN=[A-Z]+>, <TASK=[A-Z]+>")
_TASK = "<TASK="


def format_(sample: Sample) -> float:
    """1 for two lines, a header of any domain and a line that ends with `}`; for irrelevant images, the exact text."""
    if sample.irrelevant:
        return float(sample.text == sample.agreed.summary.irrelevant.text)
    lines = sample.lines
    return float(
        len(lines) == HEADER_LINES and _is_header(sample, lines[0]) and lines[1].strip().endswith("}"),
    )


def header(sample: Sample) -> float:
    """1 for exactly the header of the record's domain, else 0; -1 for a header about an irrelevant image."""
    if sample.irrelevant:
        return -1.0 if _is_header(sample, sample.lines[0]) or _TASK in sample.text else 0.0
    return float(sample.lines[0] == sample.agreed.header(sample.domain))


def strict(sample: Sample) -> float:
    """-1 unless the answer is two lines with the right header; 0 for irrelevant images."""
    return 0.0 if sample.irrelevant or sample.has_header else -1.0


def parse(sample: Sample) -> float:
    """-1 unless there is a second line of valid JSON without forbidden keys; 0 for irrelevant images."""
    line = sample.second_line
    return 0.0 if sample.irrelevant or (line is not None and sample.allowed(line)) else -1.0


def no_dup_keys(sample: Sample) -> float:
    """-1 where a key stands twice in one mapping of the second line, however deep."""
    line = sample.second_line
    return -1.0 if not sample.irrelevant and line is not None and line.repeats_keys else 0.0


def dataset(sample: Sample) -> float:
    """1 where the header names the record's domain and the strict JSON line is there."""
    return float(not sample.irrelevant and sample.strict is not None)


def _is_header(sample: Sample, line: str) -> bool:
    """Whether a line is a header of any domain, known or not, in the general form or in the contract's own."""
    contract = sample.agreed
    known = {contract.header(domain) for domain in contract.summary.domains}
    return _ANY_HEADER.fullmatch(line) is not None or line in known
