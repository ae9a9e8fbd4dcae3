"""Reading order: rows of objects from top to bottom, and the objects of each row from left to right.

Sorting by exact tops is no reading order: of two bottles beside each other on a shelf, the one whose box begins a pixel
higher would come first, which nobody can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Bounds(NamedTuple):
    """The box around an object, in any unit."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def from_bins(cls, bins: Sequence[int]) -> Bounds:
        """Return the bounds of a box or a polygon, whose x and y are given in turn."""
        return cls(min(bins[::2]), min(bins[1::2]), max(bins[::2]), max(bins[1::2]))

    @property
    def height(self) -> float:
        """Its height."""
        return self.bottom - self.top

    @property
    def double_middle(self) -> float:
        """Twice the height of its middle above the upper edge of the image, so that integers stay exact."""
        return self.top + self.bottom


def beside(one: Bounds, other: Bounds) -> bool:
    """Whether two objects stand beside each other: the vertical middle of the lower one lies in the other's height.

    The lower one is the one of less height, so neither must be named first.
    """
    return abs(one.double_middle - other.double_middle) <= max(one.height, other.height)


def in_rows(objects: Iterable[T], bounds: Callable[[T], Bounds], tie: Callable[[T], Any]) -> list[list[T]]:
    """Return the objects in rows. The order in which they are given does not matter.

    Each two objects of a row stand beside each other. From the topmost object on, each one joins the first row with all
    of whose objects it stands so, or begins a new one. tie: orders objects with equal bounds.
    """
    rows: list[_Row[T]] = []
    waiting: list[_Row[T]] = []  # those that end below the object's top
    for place, rest, one in sorted(
        ((bounds(one), tie(one), one) for one in objects),
        key=lambda entry: (entry[0].top, entry[0].left, entry[0].bottom, entry[0].right, entry[1]),
    ):
        waiting = [row for row in waiting if row.bottom >= place.top]
        row = next((row for row in waiting if row.takes(place)), None)
        if row is None:
            row = _Row()
            rows.append(row)
            waiting.append(row)
        row.add(place, rest, one)
    return [row.from_left_to_right() for row in rows]


def in_reading_order(objects: Iterable[T], bounds: Callable[[T], Bounds], tie: Callable[[T], Any]) -> list[T]:
    """Return the objects row by row; see `in_rows`."""
    return [one for row in in_rows(objects, bounds, tie) for one in row]


@dataclass
class _Row(Generic[T]):
    """A row. middles: of the objects of each height the least and the greatest, so that a long row is judged fast."""

    bottom: float = float("-inf")
    objects: list[tuple[Bounds, Any, T]] = field(default_factory=list)
    middles: dict[float, tuple[float, float]] = field(default_factory=dict)

    def takes(self, place: Bounds) -> bool:
        """Whether an object stands beside all objects of the row, as `beside` says."""
        middle = place.double_middle
        return all(
            max(middle - least, greatest - middle) <= max(height, place.height)
            for height, (least, greatest) in self.middles.items()
        )

    def add(self, place: Bounds, tie: Any, one: T) -> None:
        middle = place.double_middle
        least, greatest = self.middles.get(place.height, (middle, middle))
        self.middles[place.height] = min(least, middle), max(greatest, middle)
        self.bottom = max(self.bottom, place.bottom)
        self.objects.append((place, tie, one))

    def from_left_to_right(self) -> list[T]:
        return [one for _, _, one in sorted(self.objects, key=lambda entry: (entry[0], entry[1]))]
