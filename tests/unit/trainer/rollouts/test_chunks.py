"""Requests are dealt to servers in contiguous chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage2_trainer.rollouts.rollout_source import contiguous_chunks


@pytest.mark.parametrize(
    ("n", "servers", "expected"),
    [
        (7, 3, [(0, 3), (3, 6), (6, 7)]),
        (4, 3, [(0, 2), (2, 4), (4, 4)]),
        (0, 3, [(0, 0), (0, 0), (0, 0)]),
        (2, 5, [(0, 1), (1, 2), (2, 2), (2, 2), (2, 2)]),
    ],
)
def test_chunks_are_those_of_the_specification(n, servers, expected):
    assert contiguous_chunks(n, servers) == expected


@given(st.integers(0, 500), st.integers(1, 16))
def test_chunks_cover_every_request_once_in_order(n, servers):
    chunks = contiguous_chunks(n, servers)
    assert len(chunks) == servers
    assert [i for start, end in chunks for i in range(start, end)] == list(range(n))
