"""What came of the runs: a table for each regime, and the differences of its arms with Student's t over the starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from bench.regimes.arms import ARMS, BIASED, EARLY
from scipy.stats import t as student

FIGURES = (
    "f1@0.5", "f1_class@0.5", "precision@0.5", "recall@0.5", "objects_per_truth", "truncated_rate",
)  # fmt: skip
COMPARED = FIGURES[:2]
BASELINES = (
    "start", "a", "a-long", "a-slow", f"a, {EARLY}", f"a, {BIASED}", "best-of-8", "cut", "own-labels",
    f"own-labels, {BIASED}", "own-labels-longer", "agreed-labels",
)  # fmt: skip
Line = Mapping[str, Any]


def tables(lines: Sequence[Line], regimes: Sequence[str]) -> Iterator[str]:
    """Yield the Markdown lines of a table of each regime of which there are figures, and of its differences."""
    for regime in regimes:
        here = [one for one in lines if one["regime"] == regime]
        arms = {name: {one["start"]: one for one in here if one["arm"] == name} for name in _names(here)}
        if arms:
            yield f"## {regime}\n\n"
            yield from _means(arms)
            yield "\n"
            yield from _differences(arms)
            yield "\n"


def _names(lines: Sequence[Line]) -> list[str]:
    """Return the names of the runs in the order of `ARMS`; those of an arm in the order in which it writes them."""
    found = {str(one["arm"]): None for one in lines}
    order = ["start", *ARMS]
    return sorted(found, key=lambda name: order.index(name.partition(", ")[0]))


def _means(arms: Mapping[str, Mapping[int, Line]]) -> Iterator[str]:
    yield f"| arm | starts | steps | CPU s | {' | '.join(FIGURES)} |\n"
    yield f"| --- | ---: | ---: | ---: |{' ---: |' * len(FIGURES)}\n"
    for name, runs in arms.items():
        means = [fmean(float(one[key]) for one in runs.values()) for key in ("steps", "cpu_s", *FIGURES)]
        cells = " | ".join([f"{means[0]:.0f}", f"{means[1]:.0f}", *(f"{one:.3f}" for one in means[2:])])
        yield f"| {_what(name)} | {len(runs)} | {cells} |\n"


def _differences(arms: Mapping[str, Mapping[int, Line]]) -> Iterator[str]:
    baselines = [name for name in BASELINES if name in arms]
    yield f"| {', '.join(COMPARED)} against | {' | '.join(baselines)} |\n"
    yield f"| --- |{' ---: |' * len(baselines)}\n"
    for name, runs in arms.items():
        cells = [_cell(runs, arms[other]) if other != name else "" for other in baselines]
        yield f"| {name} | {' | '.join(cells)} |\n"


def _cell(runs: Mapping[int, Line], others: Mapping[int, Line]) -> str:
    starts = sorted(runs.keys() & others.keys())
    return "<br>".join(difference([runs[one][key] - others[one][key] for one in starts]) for key in COMPARED)


def difference(values: Sequence[float]) -> str:
    """Return the mean of differences and its 95 % interval by Student's t; a single one has no interval.

    >>> difference([0.1, 0.2, 0.3])
    '+0.200 [-0.048, +0.448]'
    """
    if not values:
        return ""
    mean = fmean(values)
    if len(values) == 1:
        return f"{_signed(mean)} (one start)"
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return f"{_signed(mean)} [{_signed(mean - half)}, {_signed(mean + half)}]"


def _signed(value: float) -> str:
    return f"{value:+.3f}"


def _what(name: str) -> str:
    arm, comma, choice = name.partition(", ")
    return f"({arm}) {ARMS[arm].what}{comma}{choice}" if arm in ARMS else name
