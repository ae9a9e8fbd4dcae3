"""The servers that take part in a run come and go, and nobody waits for one as long as another answers."""

from __future__ import annotations

import threading

import pytest

from stage2_api.errors import ConfigError, Problem
from stage2_api.vllm import ServerAddress
from stage2_trainer.rollouts.members import Members
from stage2_trainer.wire.errors import ServerError

A, B, C = (ServerAddress(f"http://{name}:1", 50 + place) for place, name in enumerate("abc"))
WAIT_S = 10


class Servers:
    """A list of servers, of which some answer, and what members are told."""

    def __init__(self) -> None:
        self.listed, self.answering, self.told = [A, B], {A, B}, []
        self.refused: ConfigError | None = None
        self.lost_again: set[ServerAddress] = set()  # after they answered
        self.members = Members(
            [A, B],
            listed=lambda: self.listed,
            greet=self.greet,
            wait=self.wait,
            on_change=lambda servers: self.told.append(list(servers)),
        )

    def greet(self, server):
        if server not in self.answering - self.lost_again:
            raise ServerError(server.base_url, "health", "is not there")
        if self.refused:
            raise self.refused

    def wait(self, servers):
        if there := [one for one in servers if one in self.answering]:
            return there
        raise ServerError(servers[0].base_url, "health", "not healthy within 1 s")

    def follow(self, *lost, asked=()):
        """Follow, once those that were asked in the background have answered."""
        joined = self.members.follow({one.base_url for one in lost})
        for one in asked:
            future = self.members._greeted[one]
            done = threading.Event()
            future.add_done_callback(lambda _, done=done: done.set())
            assert done.wait(WAIT_S)
        return joined


@pytest.fixture
def servers():
    return Servers()


def test_unchanged_servers_cause_no_notification(servers):
    assert not servers.follow()
    assert servers.told == []


def test_lost_server_is_removed_at_once_and_rejoins_after_it_answers(servers):
    servers.answering = {A}
    assert not servers.follow(B, asked=[B])
    assert not servers.follow(asked=[])
    servers.answering = {A, B}
    assert not servers.follow(asked=[B])
    assert servers.follow()
    assert servers.told == [[A], [A, B]]


def test_members_follow_server_list_in_its_order(servers):
    servers.listed, servers.answering = [C, A], {A, C}
    assert not servers.follow(asked=[C])
    assert servers.follow()
    assert servers.told == [[A], [C, A]]


def test_run_waits_for_server_only_when_none_is_left(servers):
    servers.answering = {B}
    assert servers.follow(A, B)
    assert servers.told == [[B]]
    servers.answering = set()
    with pytest.raises(ServerError, match="not healthy within 1 s"):
        servers.follow(B)


def test_first_server_that_answers_ends_wait(servers):
    servers.lost_again = {A}
    assert servers.follow(A, B)
    assert servers.told == [[B]]
    servers.lost_again = {A, B}
    with pytest.raises(ServerError, match=r"http://a:1.*also server http://b:1"):
        servers.follow(B)


def test_new_server_with_different_tokenization_stops_run(servers):
    servers.listed, servers.answering = [A, B, C], {A, B, C}
    servers.refused = ConfigError([Problem("server http://c:1", "x", "differs", "change it")])
    assert not servers.follow(asked=[C])
    with pytest.raises(ConfigError, match="http://c:1"):
        servers.follow()
