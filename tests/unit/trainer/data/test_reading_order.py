"""Objects are read in rows from top to bottom, and each row from left to right."""

import random

import pytest

from stage2_trainer.data.reading_order import Bounds, in_reading_order, in_rows


def rows(boxes):
    """Return the rows of boxes (left, top, right, bottom), given by their names."""
    return ["".join(row) for row in in_rows(boxes, lambda name: Bounds(*boxes[name]), lambda name: name)]


def plain_rows(boxes):
    """Return rows as the rule says it: every pair is compared."""
    found = []
    for box in sorted(boxes, key=lambda box: (box[1], box[0], box[3], box[2])):
        for row in found:
            if all(beside(box, other) for other in row):
                row.append(box)
                break
        else:
            found.append([box])
    return [sorted(row) for row in found]


def beside(one, other):
    lower, higher = sorted((one, other), key=lambda box: box[3] - box[1])
    return higher[1] <= (lower[1] + lower[3]) / 2 <= higher[3]


def random_boxes(draw, count, side=100):
    corners = [(draw.randrange(side), draw.randrange(side)) for _ in range(count)]
    return [(x, y, x + draw.randint(0, side // 2), y + draw.randint(0, side // 2)) for x, y in corners]


def read(boxes):
    return in_rows(boxes, lambda box: Bounds(*box), lambda box: ())


SCENES = {
    "shelves with uneven tops": (
        {"c": (50, 0, 65, 44), "a": (5, 3, 20, 46), "b": (27, 2, 42, 50),
         "e": (30, 61, 45, 99), "d": (4, 64, 20, 97), "f": (55, 60, 70, 100)},
        ["abc", "def"],
    ),
    "bottles and cans that stand on a shelf": (
        {"b": (20, 70, 30, 100), "a": (0, 0, 10, 100), "d": (60, 2, 70, 101), "c": (40, 40, 50, 99),
         "e": (0, 110, 9, 140), "f": (20, 105, 29, 140)},
        ["abcd", "ef"],
    ),
    "lamps that hang from one ceiling": (
        {"a": (0, 1, 10, 30), "b": (20, 0, 30, 45), "c": (40, 2, 50, 25), "d": (5, 60, 15, 80)},
        ["abc", "d"],
    ),
    "lines of text with short and tall words": (
        {"a": (0, 6, 30, 20), "b": (35, 0, 60, 20), "c": (65, 6, 90, 26), "d": (95, 16, 99, 20),
         "f": (35, 34, 70, 48), "e": (0, 28, 30, 48), "g": (75, 34, 90, 54)},
        ["abcd", "efg"],
    ),
    "seats in rows that hide each other": (
        {"a": (0, 0, 20, 60), "b": (22, 3, 42, 63), "c": (44, 1, 64, 61),
         "d": (11, 40, 31, 100), "e": (33, 43, 53, 103), "f": (-10, 80, 10, 140), "g": (60, 82, 80, 142)},
        ["abc", "de", "fg"],
    ),
    "a staggered grid": (
        {"a": (0, 0, 10, 40), "b": (40, 2, 50, 42), "c": (20, 26, 30, 66), "d": (60, 24, 70, 64),
         "e": (0, 52, 10, 92), "f": (40, 50, 50, 90)},
        ["ab", "cd", "ef"],
    ),
    "a staircase": (
        {letter: (12 * step, 15 * step, 12 * step + 10, 15 * step + 40) for step, letter in enumerate("abcdef")},
        ["ab", "cd", "ef"],
    ),
    "a tall object left of two rows": (
        {"t": (0, 0, 10, 100), "a": (20, 1, 30, 46), "b": (40, 0, 50, 45),
         "c": (20, 55, 30, 100), "d": (40, 54, 50, 99)},
        ["tab", "cd"],
    ),
    "a tall object that begins a little lower than its first row": (
        {"t": (0, 3, 10, 100), "a": (20, 1, 30, 46), "b": (40, 0, 50, 45),
         "c": (20, 55, 30, 100), "d": (40, 54, 50, 99)},
        ["tab", "cd"],
    ),
    "a tall object right of three": (
        {"t": (40, 0, 50, 150), "a": (0, 0, 30, 45), "b": (0, 52, 30, 97), "c": (0, 105, 30, 150)},
        ["at", "b", "c"],
    ),
    "a box around all others": (
        {"z": (0, 0, 100, 100), "a": (5, 5, 30, 30), "b": (40, 8, 70, 33), "c": (6, 60, 30, 90)},
        ["zab", "c"],
    ),
    "one column": ({"c": (3, 60, 9, 90), "a": (5, 0, 9, 30), "b": (0, 30, 9, 60)}, ["a", "b", "c"]),
    "points and lines without a height": (
        {"b": (9, 5, 9, 5), "a": (1, 5, 8, 5), "c": (0, 6, 0, 6)},
        ["ab", "c"],
    ),
    "nothing": ({}, []),
}  # fmt: skip


@pytest.mark.parametrize(("boxes", "expected"), SCENES.values(), ids=SCENES)
def test_objects_are_read_in_rows(boxes, expected):
    assert rows(boxes) == expected
    draw = random.Random(3)
    for _ in range(20):
        assert rows(dict(draw.sample([*boxes.items()], len(boxes)))) == expected, "given in another order"
        wide, high = draw.randint(1, 9), draw.randint(1, 9)
        scaled = {
            name: (wide * x, high * y, wide * right, high * bottom) for name, (x, y, right, bottom) in boxes.items()
        }
        assert rows(scaled) == expected, "the same in another unit"


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("seed", range(200))
def test_row_order_equals_plain_reference_implementation(seed):
    draw = random.Random(seed)
    boxes = [*dict.fromkeys(random_boxes(draw, draw.randint(0, 40)))]
    assert read(boxes) == plain_rows(boxes)
    assert read(draw.sample(boxes, len(boxes))) == plain_rows(boxes)


def test_objects_with_equal_boxes_are_ordered_by_tie_breaker():
    place = (3, 3, 9, 9)
    pairs = [(place, "b"), (place, "a"), ((0, 3, 2, 9), "c")]
    for given in (pairs, pairs[::-1]):
        found = in_reading_order(given, lambda pair: Bounds(*pair[0]), lambda pair: pair[1])
        assert [name for _, name in found] == ["c", "a", "b"]


def test_polygon_bounds_contain_all_points():
    assert Bounds.from_bins((5, 40, 90, 7, 60, 80)) == (5, 7, 90, 80)


def test_ten_thousand_objects_are_read_within_seconds():
    draw = random.Random(5)
    found = read([(x, y, x + 9, y + draw.randint(1, 999 - y)) for x in range(100) for y in range(0, 500, 5)])
    assert sum(map(len, found)) == 10_000
