"""The order of the objects in a data file: which known one it is, and how much of it nobody could see."""

import random
from types import SimpleNamespace

import pytest

from stage2_trainer.data.object_order import ROWS, TOPS, ObjectOrder
from stage2_trainer.data.reading_order import Bounds, in_reading_order
from stage2_trainer.matching import GTObject


def box(left, top, right, bottom, desc="cat"):
    return GTObject(desc, "bbox", (left, top, right, bottom))


def order_of(scenes):
    """The order of records with these objects."""
    return ObjectOrder.from_records(SimpleNamespace(objects=tuple(objects)) for objects in scenes)


def by_tops(objects):
    return sorted(objects, key=lambda one: (one.bins[1], one.bins[0]))


def by_rows(objects):
    return in_reading_order(objects, lambda one: Bounds.from_bins(one.bins), lambda one: one.desc)


def scattered(draw):
    corners = [(draw.randrange(800), draw.randrange(800)) for _ in range(10)]
    return [box(x, y, x + draw.randint(20, 190), y + draw.randint(20, 190), f"{draw.random()}") for x, y in corners]


def shelves(draw):
    """Three shelves of five boxes, whose tops differ by at most 12 of 1,000 bins."""
    corners = [(40 + 190 * column, 60 + 320 * shelf + draw.randint(0, 12)) for shelf in range(3) for column in range(5)]
    return [box(x, y, x + 150, y + 220) for x, y in corners]


ORDERS = {
    ROWS: by_rows,
    TOPS: by_tops,
    "left to right": lambda objects: sorted(objects, key=lambda one: (one.bins[0], one.bins[1])),
    "largest first": lambda objects: sorted(
        objects, key=lambda one: (one.bins[0] - one.bins[2]) * (one.bins[3] - one.bins[1])
    ),
    "by description": lambda objects: sorted(objects, key=lambda one: one.desc),
}


@pytest.mark.parametrize("name", ORDERS)
def test_known_object_order_is_recognised(name):
    draw = random.Random(1)
    scenes = [ORDERS[name](scattered(draw)) for _ in range(20)]
    order = order_of(scenes)
    assert order.best == (name, 1.0)
    assert str(order).startswith(f"{name} (100% of neighbours; ")


def test_unordered_objects_get_advice_to_sort():
    draw = random.Random(1)
    order = order_of(scattered(draw) for _ in range(20))
    assert order.is_missing
    assert str(order).startswith("none; the nearest is ")
    assert order.advice.startswith("sort the objects of each record in rows")


def test_too_few_objects_have_no_order_and_no_advice():
    order = order_of([[], [box(0, 0, 9, 9)], by_tops(shelves(random.Random(1)))])
    assert (str(order), order.best, order.advice) == ("too few objects to tell", None, None)


def test_objects_sorted_by_exact_tops_get_advice_to_sort_in_rows():
    draw = random.Random(1)
    scenes = [shelves(draw) for _ in range(40)]
    old, new = order_of(map(by_tops, scenes)), order_of(map(by_rows, scenes))
    assert (old.best, old.is_missing) == ((TOPS, 1.0), False)
    assert "they are sorted by exact tops" in old.advice
    assert "86% of neighbours hangs on ties or near ties (0% in rows)" in old.advice
    assert (new.best, new.advice, str(new)) == (
        (ROWS, 1.0),
        None,
        "in rows (100% of neighbours; 0% are ties or near ties)",
    )


def test_order_matching_both_rows_and_tops_is_reported_as_rows():
    grid = [
        box(200 * column, 300 * row, 200 * column + 150, 300 * row + 200) for row in range(3) for column in range(5)
    ]
    order = order_of([grid] * 5)
    assert (order.best, order.advice) == ((ROWS, 1.0), None)


def test_clearly_different_tops_give_no_advice():
    column = [box(100, 100 * row, 200, 100 * row + 90) for row in range(9)]
    staggered = [box(500 - 50 * step, 30 * step, 600, 30 * step + 100) for step in range(9)]
    order = order_of([column] * 3 + [staggered] * 5)
    assert (order.best, order.advice) == ((TOPS, 1.0), None)


NEIGHBOURS = {
    "in one row, far apart": (ROWS, box(0, 0, 100, 100), box(200, 9, 300, 109), (0, 0)),
    "in one row, a tenth of the narrower one's width apart": (ROWS, box(0, 0, 100, 300), box(10, 9, 110, 109), (0, 1)),
    "in one row, a little more than a tenth apart": (ROWS, box(0, 0, 100, 300), box(11, 9, 111, 109), (0, 0)),
    "in two rows, one below the other": (ROWS, box(500, 0, 600, 100), box(0, 105, 90, 205), (0, 0)),
    "the lower one's middle just below the other's height": (ROWS, box(500, 0, 600, 100), box(0, 55, 90, 155), (0, 1)),
    "the same, with the lower one on the right": (ROWS, box(0, 0, 90, 100), box(500, 55, 600, 155), (0, 0)),
    "in one place": (ROWS, box(0, 0, 100, 100), box(0, 0, 100, 100, "dog"), (1, 0)),
    "tops that differ by a tenth of the lower one's height": (TOPS, box(0, 0, 9, 900), box(50, 10, 90, 110), (0, 1)),
    "tops that differ by more": (TOPS, box(0, 0, 9, 900), box(50, 11, 90, 111), (0, 0)),
    "equal tops": (TOPS, box(0, 0, 9, 90), box(50, 0, 90, 90), (0, 1)),
    "equal corners": (TOPS, box(0, 0, 9, 90), box(0, 0, 90, 80), (1, 0)),
    "lefts that differ by a tenth": ("left to right", box(0, 0, 100, 9), box(10, 50, 110, 90), (0, 1)),
    "lefts that differ by more": ("left to right", box(0, 0, 100, 9), box(11, 50, 111, 90), (0, 0)),
    "equal areas": ("largest first", box(0, 0, 10, 10), box(50, 50, 55, 70), (1, 0)),
    "areas that differ by a tenth": ("largest first", box(0, 0, 10, 10), box(50, 50, 61, 60), (0, 1)),
    "areas that differ by more": ("largest first", box(0, 0, 10, 10), box(50, 50, 62, 60), (0, 0)),
    "equal descriptions": ("by description", box(0, 0, 10, 10), box(50, 50, 61, 60), (1, 0)),
    "other descriptions": ("by description", box(0, 0, 10, 10), box(50, 50, 61, 60, "dog"), (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "one", "other", "expected"), NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_ties_and_near_ties_are_counted(name, one, other, expected):
    for objects in ([one, other], [other, one]):
        order = order_of([objects])
        assert (order.ties[name], order.near_ties[name]) == expected
        assert order.ambiguous(name) == sum(expected)


def test_polygons_are_measured_by_their_bounds():
    shapes = [GTObject("cat", "poly", (x + 5, y, x + 10, y + 9, x, y + 9)) for x, y in ((0, 1), (20, 0), (40, 2))] * 30
    assert order_of([shapes[k : k + 3] for k in range(0, 90, 3)]).best == (ROWS, 1.0)
