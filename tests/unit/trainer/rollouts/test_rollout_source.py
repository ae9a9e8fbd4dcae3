"""Requests are dealt to servers in contiguous chunks, and a refused call is repeated in halves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage2_trainer.rollouts.rollout_source import ask_in_parts, contiguous_chunks
from stage2_trainer.wire.requests import Refused
from tests.unit.trainer.matching.golden import golden


@given(st.integers(0, 500), st.integers(1, 16))
def test_chunks_cover_every_request_once_in_order(n, servers):
    chunks = contiguous_chunks(n, servers)
    assert len(chunks) == servers
    assert [i for start, end in chunks for i in range(start, end)] == list(range(n))


@pytest.mark.parametrize("case", golden()["chunks"])
def test_chunks_match_golden_vectors(case):
    assert list(map(list, contiguous_chunks(case["requests"], case["servers"]))) == case["ranges"]


def ask_all_but(bad, calls):
    def ask(requests):
        calls.append(list(requests))
        if bad & set(requests):
            raise ValueError("too long")
        return [10 * one for one in requests]

    return ask


@pytest.mark.parametrize("bad", [set(), {0}, {3, 4}, {0, 1, 2, 3, 4, 5, 6}])
def test_only_faulty_requests_of_refused_call_are_refused(bad):
    calls = []
    found = ask_in_parts(ask_all_but(bad, calls), range(7), refuses=lambda error: isinstance(error, ValueError))
    assert [place for place, one in enumerate(found) if isinstance(one, Refused)] == sorted(bad)
    assert [one for one in found if not isinstance(one, Refused)] == [10 * one for one in range(7) if one not in bad]
    assert len(calls) == 1 or bad


def test_other_errors_are_raised_without_retry():
    calls = []
    with pytest.raises(ValueError, match="too long"):
        ask_in_parts(ask_all_but({2}, calls), range(4), refuses=lambda error: False)
    assert len(calls) == 1
