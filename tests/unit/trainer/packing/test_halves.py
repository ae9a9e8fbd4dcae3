"""Rows of a list whose segments come in any order: known early, the same whatever the order, and few."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stage2_trainer.packing import HalvedRows, PackingError, first_fit_decreasing

ROW = 12_000  # that of examples/job-3v1.yaml


def answers(seed, count=32, prompt=1100, mean=1200, sigma=0.8):
    """Lengths of a step's segments: an 8B's prompts, and answers whose lengths are lognormal."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return [prompt + min(int(length), 8192) for length in drawn]


def rows_of(lengths, order=None):
    """The rows in the order in which they are known, and how many of them were known before the last segment."""
    planned = HalvedRows(ROW, len(lengths))
    early = [row for place in order or range(len(lengths)) for row in planned.add(place, lengths[place])]
    return early + planned.finish(), len(early)


@pytest.mark.parametrize("seed", range(20))
def test_every_segment_is_in_one_row_and_at_most_one_row_is_surplus(seed):
    lengths = answers(seed)
    rows, _ = rows_of(lengths)
    assert sorted(i for row in rows for i in row) == list(range(32))
    assert all(row == sorted(row) for row in rows)
    assert all(sum(lengths[i] for i in row) <= ROW for row in rows)
    assert len(rows) <= -(-sum(lengths) // ROW) + 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 2, 7, 32, 100])
def test_rows_do_not_depend_on_arrival_order_of_segments(seed, count):
    lengths = answers(seed, count)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    assert sorted(rows_of(lengths, order)[0]) == sorted(rows_of(lengths)[0])


def test_late_segment_delays_only_rows_of_its_halves():
    lengths = [
        3000
    ] * 32  # four fill a row, eight are two rows: the eight with the last one wait, and what is left over
    for last in range(32):
        planned = HalvedRows(ROW, 32)
        others = [place for place in range(32) if place != last]
        known = [row for place in others for row in planned.add(place, lengths[place])]
        assert len(known) >= 3
        assert not any(last in row for row in known)


def test_rows_of_example_job_are_ninety_percent_full_and_half_are_known_early():
    found = [(sum(lengths) / ROW, *rows_of(lengths)) for lengths in map(answers, range(20))]
    assert np.mean([filled / len(rows) for filled, rows, _ in found]) >= 0.9
    assert np.mean([early / len(rows) for _, rows, early in found]) >= 0.5


def test_segment_longer_than_row_is_refused():
    with pytest.raises(PackingError, match="post_rollout_overlong"):
        HalvedRows(10, 1).add(0, 11)


def test_no_segments_make_no_rows():
    assert first_fit_decreasing([], 10) == HalvedRows(10, 0).finish() == []


def test_first_fit_decreasing_places_longest_segment_into_first_row_with_room():
    assert first_fit_decreasing([3, 4, 5, 6, 2, 8], 10) == [[0, 2], [1, 3], [4, 5]]
    assert first_fit_decreasing([6, 6, 6], 10) == [[0], [1], [2]]
