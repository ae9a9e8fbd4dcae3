"""The division of requests by the speed of servers and by the lengths that answers are expected to have."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from stage2_trainer.rollouts.speeds import Speeds
from stage2_trainer.wire.requests import Rollout


def answer(server: str, tokens: int) -> Rollout:
    return Rollout([1], [2] * tokens, "", server, 0, "stop", seconds=1.0)


def measured(**tokens_per_s: int) -> Speeds:
    speeds = Speeds()
    speeds.measure([answer(server, tokens) for server, tokens in tokens_per_s.items()])
    return speeds


def test_server_that_was_slow_once_is_used_again():
    speeds = measured(a=100, b=5)
    assert speeds.divide(range(8), ["a", "b"]) == {"a": range(8), "b": range(0)}
    assert speeds.divide(range(2), ["a", "b"], [8, 9]) == {"a": [1, 0], "b": []}
    speeds.measure([answer("a", 100)])
    assert speeds.divide(range(8), ["a", "b"]) == {"a": range(5), "b": range(5, 8)}


def test_answers_without_tokens_do_not_change_speeds():
    assert measured(a=0, b=0).divide(range(4), ["a", "b"]) == {"a": range(2), "b": range(2, 4)}


def test_equal_expected_lengths_divide_like_unknown_lengths():
    speeds = measured(a=30, b=10)
    for servers in (["c", "d", "e"], ["a", "b"]):
        assert speeds.divide(range(7), servers, [2] * 7) == speeds.divide(range(7), servers)


SPEEDS = {"a": 100, "b": 100, "c": 40, "d": 7}


@given(
    st.lists(st.integers(2, 5000), min_size=2, max_size=60).filter(lambda lengths: len(set(lengths)) > 1),
    st.lists(st.sampled_from([*SPEEDS, "new"]), min_size=1, unique=True),
    st.data(),
)
def test_each_request_goes_once_to_server_that_finishes_first(expected, servers, data):
    speeds = measured(**SPEEDS)
    known = [SPEEDS[one] for one in servers if one in SPEEDS]
    asked = data.draw(st.lists(st.sampled_from(range(len(expected))), unique=True, min_size=1))
    if len({expected[index] for index in asked}) == 1:
        return
    shares = speeds.divide(asked, servers, expected)
    assert list(shares) == servers
    assert sorted(index for share in shares.values() for index in share) == sorted(asked)
    ends = {}
    for server, share in shares.items():
        lengths = [expected[index] for index in share]
        assert lengths == sorted(lengths, reverse=True)
        speed = SPEEDS.get(server) or (sum(known) / len(known) if known else 1.0)
        ends[server] = [length / speed for length in accumulate(lengths, initial=0)], speed
    last = max(servers, key=lambda server: ends[server][0][-1])
    (until, speed) = ends[last]
    shortest = (until[-1] - until[-2]) * speed
    for times, other in ends.values():
        assert times[-1] + shortest / other >= until[-1] * (1 - 1e-9), "nobody else would have answered it earlier"
