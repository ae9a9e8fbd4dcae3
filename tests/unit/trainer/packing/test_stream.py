"""Rows of a stream of segments: known early, never the last, the same whatever the time, and few."""

from __future__ import annotations

import numpy as np
import pytest

from stage2_trainer.packing import PackingError, RowStream, fewest_rows

ROW = 12_000  # that of examples/job-3v1.yaml


def answers(seed, count=32, prompt=1100, mean=1200, sigma=0.8):
    """Lengths of a step's segments: an 8B's prompts, and answers whose lengths are lognormal."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return [prompt + min(int(length), 8192) for length in drawn]


def rows_of(lengths):
    """The rows, as indices, and how many of them were known before the last segment."""
    stream: RowStream[int] = RowStream(ROW)
    early = [row for i, length in enumerate(lengths) if (row := stream.add(i, length)) is not None]
    return early + stream.finish(), len(early)


@pytest.mark.parametrize("seed", range(20))
def test_every_segment_is_in_one_row_and_rows_are_at_most_one_more_than_their_tokens_fill(seed):
    lengths = answers(seed)
    rows, early = rows_of(lengths)
    assert sorted(i for row in rows for i in row) == list(range(32))
    assert all(sum(lengths[i] for i in row) <= ROW for row in rows)
    assert len(rows) <= -(-sum(lengths) // ROW) + 1
    assert len(rows) > early >= len(rows) - 2


def test_rows_of_the_shipped_job_are_nine_tenths_full():
    fills = [sum(lengths) / ROW / len(rows_of(lengths)[0]) for lengths in map(answers, range(20))]
    assert np.mean(fills) >= 0.9


def test_a_segment_longer_than_a_row_is_refused():
    with pytest.raises(PackingError, match="post_rollout_overlong"):
        RowStream(10).add("x", 11)


def test_no_segments_make_no_rows():
    assert fewest_rows([], 10) == RowStream(10).finish() == []


def test_the_fewest_rows_are_found():
    assert len(fewest_rows([3, 4, 5, 6, 2, 8], 10)) == 3
    assert len(fewest_rows([6, 6, 6], 10)) == 3
