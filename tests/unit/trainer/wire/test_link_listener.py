"""The learner's port: workers get in through any crowd of strangers, and nobody else does."""

import contextlib
import socket
import threading
import time

import pytest

from stage2_trainer.sync.transports import link_listener
from stage2_trainer.sync.transports.handshake import Member
from stage2_trainer.sync.transports.link import dial
from stage2_trainer.sync.transports.link_listener import LinkListener
from stage2_trainer.sync.transports.protocol import address_towards, new_group_name
from stage2_trainer.wire.errors import LinkError

LOOPBACK = "127.0.0.1"
TOKEN = "a-token"
PATIENCE_S = 20.0


@pytest.fixture
def listener(port):
    listener = LinkListener(LOOPBACK, port, TOKEN)
    yield listener
    listener.close()


def members(count):
    group = new_group_name()
    return [Member(group, rank) for rank in range(1, count + 1)]


def dial_all(port, expected):
    """Dial for every member at once, and keep what comes of it."""
    links = []

    def dial_one(member):
        with contextlib.suppress(LinkError):
            links.append(dial((LOOPBACK, port), TOKEN, member, timeout_s=5))

    for member in expected:
        threading.Thread(target=dial_one, args=(member,), daemon=True).start()
    return links


def taken(listener):
    return listener.take(PATIENCE_S, lambda: None)


def test_workers_come_in_any_order_and_are_taken_by_rank(listener, port):
    expected = members(5)
    listener.expect(expected)
    links = {member.rank: dial((LOOPBACK, port), TOKEN, member, timeout_s=5) for member in reversed(expected)}
    for rank, link in enumerate(taken(listener), start=1):
        link.send([bytes([rank])], 5)
        assert links[rank].receive(1, 5) == bytes([rank])


def test_it_listens_on_the_one_address_that_servers_dial(listener, port):
    try:
        own = address_towards("192.0.2.1", 9)
    except OSError:
        pytest.skip("this machine has no other address")
    if own != LOOPBACK:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((own, port), timeout=2)


def test_a_port_in_use_is_an_error_at_once(port, squatter):
    squatter(port)
    with pytest.raises(OSError, match="in use"):
        LinkListener(LOOPBACK, port, TOKEN)


def test_a_closed_port_is_free(port):
    for _ in range(3):
        LinkListener(LOOPBACK, port, TOKEN).close()


def test_more_silent_strangers_than_may_wait_keep_no_worker_out(listener, port, monkeypatch):
    monkeypatch.setattr(link_listener, "MAX_HALF_OPEN", 8)
    expected = members(3)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection((LOOPBACK, port), timeout=5))
        listener.expect(expected)
        dialled = dial_all(port, expected)
        assert len(taken(listener)) == 3
        assert len(dialled) <= 3
        assert len(listener._half_open) <= 8


def test_a_stranger_is_turned_away_at_the_deadline(listener, port, monkeypatch):
    monkeypatch.setattr(link_listener, "HANDSHAKE_TIMEOUT_S", 0.2)
    with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as silent:
        while silent.recv(4096):
            pass


def test_nobody_else_takes_a_workers_place(listener, port):
    """Without the token, with the token for another group, and for a rank that has come already."""
    (member,) = members(1)
    listener.expect([member])
    others = [
        ("another", member),
        (TOKEN, Member(new_group_name(), 1)),
        (TOKEN, Member(member.group, 2)),
    ]
    for token, other in others:
        with pytest.raises(LinkError, match=r"closed|broke"):
            dial((LOOPBACK, port), token, other, timeout_s=5)
    first = dial((LOOPBACK, port), TOKEN, member, timeout_s=5)
    with pytest.raises(
        LinkError, match=r"closed|broke"
    ):  # at the latest of its first word: both were in their handshakes
        dial((LOOPBACK, port), TOKEN, member, timeout_s=5).receive(1, 5)
    (link,) = taken(listener)
    link.send([b"a"], 5)
    assert first.receive(1, 5) == b"a"


def test_a_wait_that_has_become_pointless_ends(listener):
    listener.expect(members(1))

    def refused():
        raise RuntimeError("the server answered 500")

    with pytest.raises(RuntimeError, match="answered 500"):
        listener.take(30, refused)


def test_nobody_who_dials_is_an_error_in_time(listener):
    listener.expect(members(1))
    with pytest.raises(TimeoutError):
        listener.take(0.1, lambda: None)


def test_nobody_listening_is_an_error_that_says_so(port):
    with pytest.raises(LinkError, match=rf"learner at 127.0.0.1:{port}: Connection refused"):
        dial((LOOPBACK, port), TOKEN, members(1)[0], timeout_s=5)


def test_an_error_of_accept_ends_nothing(listener, port, monkeypatch):
    """As with too many open files."""
    accept, failures = listener._socket.accept, iter([OSError(24, "Too many open files")] * 2)

    class Failing:
        def __getattr__(self, name):
            return getattr(real, name)

        def accept(self):
            for failure in failures:
                raise failure
            return accept()

    real, listener._socket = listener._socket, Failing()
    expected = members(1)
    listener.expect(expected)
    time.sleep(0.01)
    dialled = dial_all(port, expected * 2)
    assert len(taken(listener)) == 1
    assert dialled is not None
    listener._socket = real
