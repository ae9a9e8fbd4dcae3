"""The order in which a data file lists the objects of its records, and how much of it nobody could see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any

from stage2_trainer.data.reading_order import Bounds, in_rows
from stage2_trainer.data.records import Record
from stage2_trainer.matching.ground_truth import GTObject

ORDERED = 0.9  # share of neighbours from which a file counts as ordered; half of them are in order by chance
FEWEST_NEIGHBOURS = 50
NEAR = 0.1
"""Share of the smaller object's side below which a difference is a near tie: boxes of IoU 0.9 differ by so much."""
MOST_AMBIGUOUS = 0.1  # share of neighbours from which exact tops are no order to learn

ROWS, TOPS = "in rows", "by exact tops"
UNORDERED_ADVICE = (
    "sort the objects of each record in rows, as `stage2 import` and `stage2 data --sorted` do: on the same scenes F1"
    " was 0.96 with sorted annotations and 0.64 without an order; where an order is impossible, train stage 2 with"
    " `recipe: recommended` after stage 1 (docs/results.md)"
)


@dataclass(frozen=True)
class _Placed:
    """An object with its bounds, and the number of its row."""

    object: GTObject
    bounds: Bounds
    row: int


@dataclass(frozen=True)
class _Order:
    """A known order. key: what it sorts by. is_near: whether two objects of different keys are a near tie."""

    key: Callable[[_Placed], Any]
    is_near: Callable[[_Placed, _Placed], bool]


def _near_lefts(one: _Placed, other: _Placed) -> bool:
    widths = [placed.bounds.right - placed.bounds.left for placed in (one, other)]
    return abs(one.bounds.left - other.bounds.left) <= NEAR * min(widths)


def _near_tops(one: _Placed, other: _Placed) -> bool:
    return abs(one.bounds.top - other.bounds.top) <= NEAR * min(one.bounds.height, other.bounds.height)


def _near_in_rows(one: _Placed, other: _Placed) -> bool:
    """Whether a small move would exchange two objects: within their row, or by putting them into one row."""
    if one.row == other.row:
        return _near_lefts(one, other)
    lower, higher = sorted((one.bounds, other.bounds), key=lambda bounds: bounds.height)
    outside = (abs(one.bounds.double_middle - other.bounds.double_middle) - higher.height) / 2
    upper, following = sorted((one, other), key=lambda placed: placed.row)
    return abs(outside) <= NEAR * lower.height and following.bounds.left < upper.bounds.left


def _near_areas(one: _Placed, other: _Placed) -> bool:
    areas = area_of(one.object), area_of(other.object)
    return abs(areas[0] - areas[1]) <= NEAR * min(areas)


ORDERS: dict[str, _Order] = {
    ROWS: _Order(lambda one: (one.row, one.bounds), _near_in_rows),
    TOPS: _Order(lambda one: (one.bounds.top, one.bounds.left), _near_tops),
    "left to right": _Order(lambda one: (one.bounds.left, one.bounds.top), _near_lefts),
    "largest first": _Order(lambda one: -area_of(one.object), _near_areas),
    "by description": _Order(lambda one: one.object.desc, lambda one, other: False),
}


@dataclass
class ObjectOrder:
    """How often two neighbouring objects of a record are in a known order, and how often that order is ambiguous.

    compared, in_order: neighbours in the file whose keys differ, and those of them in the order. neighbours: in any
    order. ties, near_ties: neighbours in the order itself that have equal keys, and those that a small move exchanges.
    """

    neighbours: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    in_order: Counter[str] = field(default_factory=Counter)
    ties: Counter[str] = field(default_factory=Counter)
    near_ties: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_records(cls, records: Iterable[Record]) -> ObjectOrder:
        """Return the order of the objects in these records."""
        order = cls()
        for record in records:
            order.add(record)
        return order

    def add(self, record: Record) -> None:
        """Count the neighbours of a record."""
        self.neighbours += max(0, len(record.objects) - 1)
        objects = _placed(record.objects)
        for name, order in ORDERS.items():
            keyed = [(order.key(one), one) for one in objects]
            for (before, _), (after, _) in pairwise(keyed):
                self.compared[name] += before != after
                self.in_order[name] += before < after
            for (key, before), (next_key, after) in pairwise(sorted(keyed, key=itemgetter(0))):
                self.ties[name] += key == next_key
                self.near_ties[name] += key != next_key and order.is_near(before, after)

    @property
    def best(self) -> tuple[str, float] | None:
        """The order that most neighbours follow, with their share; None for too few neighbours."""
        shares = {n: self.in_order[n] / count for n, count in self.compared.items() if count >= FEWEST_NEIGHBOURS}
        return max(shares.items(), key=lambda one: one[1]) if shares else None

    @property
    def is_missing(self) -> bool:
        """Whether the objects follow none of the known orders."""
        return self.best is not None and self.best[1] < ORDERED

    def ambiguous(self, name: str) -> float:
        """Return the share of neighbours in an order that are ties or near ties."""
        return (self.ties[name] + self.near_ties[name]) / self.neighbours

    @property
    def advice(self) -> str | None:
        """What to do about the order; None if it is good."""
        if self.is_missing:
            return UNORDERED_ADVICE
        if self.best is None or self.best[0] != TOPS or self.ambiguous(TOPS) < MOST_AMBIGUOUS:
            return None
        return (
            "sort the objects in rows with `stage2 data --sorted`, or import them again: they are sorted by exact tops,"
            f" and the order of {self.ambiguous(TOPS):.0%} of neighbours hangs on ties or near ties"
            f" ({self.ambiguous(ROWS):.0%} in rows)"
        )

    def __str__(self) -> str:
        if self.best is None:
            return "too few objects to tell"
        name, share = self.best
        if self.is_missing:
            return f"none; the nearest is {name} ({share:.0%} of neighbours)"
        return f"{name} ({share:.0%} of neighbours; {self.ambiguous(name):.0%} are ties or near ties)"


def _placed(objects: Sequence[GTObject]) -> list[_Placed]:
    bounds = [Bounds.from_bins(one.bins) for one in objects]
    rows = in_rows(range(len(objects)), lambda place: bounds[place], lambda place: place)
    row_of = {place: number for number, row in enumerate(rows) for place in row}
    return [_Placed(one, bounds[place], row_of[place]) for place, one in enumerate(objects)]


def area_of(one: GTObject) -> float:
    """Return the area of an object in square bins; the shoelace formula for polygons."""
    xs, ys = one.bins[::2], one.bins[1::2]
    if one.kind == "bbox":
        return float((xs[1] - xs[0]) * (ys[1] - ys[0]))
    following = zip((*xs[1:], xs[0]), (*ys[1:], ys[0]), strict=True)
    return abs(sum(x * next_y - next_x * y for x, y, (next_x, next_y) in zip(xs, ys, following, strict=True))) / 2
