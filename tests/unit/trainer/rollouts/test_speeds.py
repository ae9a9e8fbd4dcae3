"""The division of requests by speed: no measurement keeps a server from being asked again."""

from stage2_trainer.rollouts.speeds import Speeds
from stage2_trainer.wire.requests import Rollout


def answer(server: str, tokens: int) -> Rollout:
    return Rollout([1], [2] * tokens, "", server, 0, "stop", seconds=1.0)


def test_a_server_that_was_slow_once_is_asked_again():
    speeds = Speeds()
    speeds.measure([answer("a", 100), answer("b", 5)])
    assert speeds.chunks(8, ["a", "b"]) == {"a": (0, 8), "b": (8, 8)}
    speeds.measure([answer("a", 100)])
    assert speeds.chunks(8, ["a", "b"]) == {"a": (0, 5), "b": (5, 8)}


def test_answers_without_a_token_measure_nothing():
    speeds = Speeds()
    speeds.measure([answer("a", 0), answer("b", 0)])
    assert speeds.chunks(4, ["a", "b"]) == {"a": (0, 2), "b": (2, 4)}
