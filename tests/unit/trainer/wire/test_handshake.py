"""The handshake: only who holds the token gets through it, whatever else is said, and however slowly."""

import random
import re
import socket
import threading
import time
import uuid
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stage2_trainer.sync.transports import handshake
from stage2_trainer.sync.transports.connection import Connection
from stage2_trainer.sync.transports.handshake import (
    CHALLENGE_BYTES,
    CLAIM_BYTES,
    MAGIC,
    PROOF_BYTES,
    Member,
    admit,
    introduce,
)
from stage2_trainer.sync.transports.link import SLICE_BYTES, TAG_BYTES, Link
from stage2_trainer.wire.errors import LinkError

TOKEN = "a-token"
SEEDS = range(40)
PATIENCE_S = 20.0


@pytest.fixture
def pair():
    """Two ends of a TCP connection."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    with Connection(ours) as one, Connection(theirs) as other:
        yield one, other


def soon():
    return time.monotonic() + PATIENCE_S


def anybody(_):
    return True


def member_of(seed):
    return Member(uuid.UUID(int=random.Random(seed).getrandbits(128)).hex, seed)


class Outcome(threading.Thread):
    """One side of a handshake, in a thread of its own."""

    def __init__(self, step, *arguments):
        super().__init__(daemon=True)
        self._step = step
        self._arguments = arguments
        self.result = self.error = None
        self.start()

    def run(self):
        try:
            self.result = self._step(*self._arguments)
        except LinkError as error:
            self.error = error

    def refused(self):
        self.join(PATIENCE_S)
        return self.error is not None


def handshake_of(pair, *, learner_token=TOKEN, worker_token=TOKEN, member=None):
    learner = Outcome(admit, pair[0], learner_token, anybody, soon())
    worker = Outcome(introduce, pair[1], worker_token, member or member_of(1), soon())
    return learner, worker


@pytest.mark.parametrize("seed", SEEDS)
def test_both_sides_that_hold_the_token_agree_on_member_and_keys(pair, seed):
    learner, worker = handshake_of(pair, member=member_of(seed))
    worker.join(PATIENCE_S)
    learner.join(PATIENCE_S)
    member, keys = learner.result
    assert (member, keys) == (member_of(seed), worker.result)
    assert keys.of_learner != keys.of_worker


def test_two_handshakes_of_one_member_have_nothing_in_common(pair):
    found = []
    for _ in range(2):
        learner, worker = handshake_of(pair)
        worker.join(PATIENCE_S)
        learner.join(PATIENCE_S)
        found.append(worker.result)
    assert len({found[0].of_learner, found[0].of_worker, found[1].of_learner, found[1].of_worker}) == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_another_token_is_refused_by_the_learner_first(pair, seed):
    other = f"{TOKEN}{random.Random(seed).random()}"
    learner, worker = handshake_of(pair, worker_token=other)
    assert learner.refused()
    pair[0].close()
    assert worker.refused()


def test_a_learner_without_the_token_is_refused_by_the_worker(pair):
    worker = Outcome(introduce, pair[1], TOKEN, member_of(1), soon())
    pair[0].send(MAGIC + bytes(32), soon())
    pair[0].receive(CLAIM_BYTES, soon())
    pair[0].send(bytes(PROOF_BYTES), soon())
    assert worker.refused()
    assert "does not prove" in str(worker.error)


def test_a_member_that_nobody_waits_for_is_refused_although_it_holds_the_token(pair):
    learner = Outcome(admit, pair[0], TOKEN, lambda member: member == member_of(2), soon())
    worker = Outcome(introduce, pair[1], TOKEN, member_of(1), soon())
    assert learner.refused()
    pair[0].close()
    assert worker.refused()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_token_never_crosses(pair, seed):
    """What a stranger who dials is told has nothing to do with the token, and what he says of a guess is refused."""
    learner = Outcome(admit, pair[0], TOKEN, anybody, soon())
    challenge = pair[1].receive(CHALLENGE_BYTES, soon())
    assert TOKEN.encode() not in challenge
    pair[1].send(random.Random(seed).randbytes(CLAIM_BYTES), soon())
    assert learner.refused()
    pair[0].close()
    with pytest.raises(LinkError, match="closed"):
        pair[1].receive(1, soon())


def recorded(pair):
    """Return what a worker says in a true handshake, as one on the network sees it."""
    claim = []
    learner = Outcome(admit, pair[0], TOKEN, anybody, soon())
    send = pair[1].send

    def record(data, deadline):
        claim.append(bytes(data))
        send(data, deadline)

    pair[1].send = record
    worker = Outcome(introduce, pair[1], TOKEN, member_of(1), soon())
    worker.join(PATIENCE_S)
    learner.join(PATIENCE_S)
    assert worker.result == learner.result[1]
    pair[1].send = send
    return claim[0]


def test_a_recorded_handshake_proves_nothing(pair):
    claim = recorded(pair)
    learner = Outcome(admit, pair[0], TOKEN, anybody, soon())
    pair[1].receive(CHALLENGE_BYTES, soon())
    pair[1].send(claim, soon())
    assert learner.refused()


def test_a_reflected_proof_proves_nothing(pair):
    """A stranger who answers a worker with the worker's own proof is no learner."""
    worker = Outcome(introduce, pair[1], TOKEN, member_of(1), soon())
    pair[0].send(MAGIC + bytes(32), soon())
    claim = pair[0].receive(CLAIM_BYTES, soon())
    pair[0].send(claim[-PROOF_BYTES:], soon())
    assert worker.refused()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_handshake_that_was_changed_on_its_way_is_refused(pair, seed):
    """One bit of group, rank, nonce or proof, between two sides that both hold the token."""
    random_ = random.Random(seed)
    learner = Outcome(admit, pair[0], TOKEN, anybody, soon())
    send = pair[1].send

    def flip(data, deadline):
        changed = bytearray(data)
        changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
        send(changed, deadline)

    pair[1].send = flip
    Outcome(introduce, pair[1], TOKEN, member_of(seed), soon())
    assert learner.refused()
    assert learner.result is None


@pytest.mark.parametrize("said", [b"", MAGIC, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95", bytes(CLAIM_BYTES - 1)])
def test_half_a_message_is_no_handshake(pair, said):
    learner = Outcome(admit, pair[0], TOKEN, anybody, soon())
    if said:
        pair[1].send(said, soon())
    pair[1].close()
    assert learner.refused()


def test_more_than_a_message_is_not_read(pair):
    learner = Outcome(admit, pair[0], TOKEN, anybody, soon())
    pair[1].send(bytes(CLAIM_BYTES), soon())
    pair[1].send(bytes(2**16), soon())
    assert learner.refused()


@pytest.mark.parametrize("drips", [False, True])
def test_who_says_nothing_or_drips_is_turned_away_at_the_deadline(pair, drips):
    learner = Outcome(admit, pair[0], TOKEN, anybody, time.monotonic() + 0.3)
    dripped = 0
    while learner.is_alive() and dripped < CLAIM_BYTES - 1:
        if drips:
            pair[1].send(b"\0", soon())
        dripped += 1
        learner.join(0.05)
    learner.join(PATIENCE_S)
    assert "not in time" in str(learner.error)
    assert dripped < CLAIM_BYTES - 1


def test_any_bytes_of_the_right_size_are_a_member_of_some_group():
    for seed in SEEDS:
        data = random.Random(seed).randbytes(20)
        assert Member.from_bytes(data).to_bytes() == data


@pytest.fixture
def links(pair):
    learner, worker = handshake_of(pair)
    worker.join(PATIENCE_S)
    learner.join(PATIENCE_S)
    return Link.of_learner(pair[0], learner.result[1]), Link.of_worker(pair[1], worker.result)


@pytest.mark.parametrize("seed", range(8))
def test_a_message_arrives_as_it_was_sent_however_it_was_cut(links, seed):
    random_ = random.Random(seed)
    for sizes in ([1], [0, 7, 0], [SLICE_BYTES + 3], [SLICE_BYTES, 1, 2, SLICE_BYTES - 1, 5], [9] * 3000, []):
        pieces = [random_.randbytes(size) for size in sizes]
        sending = Outcome(links[0].send, pieces, PATIENCE_S)
        assert links[1].receive(sum(sizes), PATIENCE_S) == b"".join(pieces)
        sending.join(PATIENCE_S)
        assert sending.error is None


def test_who_listens_cannot_read_a_message(links, pair):
    message = b"weights" * 1000
    sending = Outcome(links[0].send, [message], PATIENCE_S)
    crossed = pair[1].receive(len(message) + TAG_BYTES, soon())
    sending.join(PATIENCE_S)
    assert b"weights" not in crossed
    assert len(set(crossed)) > 200, "it looks like nothing"


def test_the_same_message_never_crosses_twice_in_the_same_form(links, pair):
    links[0].send([b"weights"] * 2, PATIENCE_S)
    links[0].send([b"weights"] * 2, PATIENCE_S)
    crossed = [pair[1].receive(14 + TAG_BYTES, soon()) for _ in range(2)]
    assert crossed[0] != crossed[1]
    assert crossed[0][:7] != crossed[0][7:14]


def test_who_knows_the_token_and_what_crossed_lacks_the_keys(pair):
    """Nothing but the two private halves, which are gone, leads from one to the other."""
    heard = bytearray()

    class Overheard(Connection):
        def send(self, data, deadline):
            heard.extend(data)
            super().send(data, deadline)

    learner = Outcome(admit, Overheard(pair[0]._socket), TOKEN, anybody, soon())
    keys = introduce(Overheard(pair[1]._socket), TOKEN, member_of(1), soon())
    learner.join(PATIENCE_S)
    assert learner.result[1] == keys
    transcript = bytes(heard)[: CHALLENGE_BYTES + CLAIM_BYTES - PROOF_BYTES]
    stranger = X25519PrivateKey.generate()
    for share in (transcript[len(MAGIC) : CHALLENGE_BYTES], transcript[-32:]):
        assert handshake._keys(TOKEN, transcript, stranger, share) != keys


def test_a_share_that_makes_every_secret_the_same_is_refused(pair):
    learner = Outcome(admit, pair[0], TOKEN, anybody, soon())
    transcript = pair[1].receive(CHALLENGE_BYTES, soon()) + member_of(1).to_bytes() + bytes(32)
    pair[1].send(transcript[CHALLENGE_BYTES:] + handshake._proof(TOKEN, handshake.WORKER, transcript), soon())
    assert learner.refused()
    assert "share" in str(learner.error)


def sealed(link, data):
    """Return a message as it crosses."""
    cipher = link._own.next().encryptor()
    crossing = cipher.update(data) + cipher.finalize()
    return crossing + cipher.tag


def test_tensors_cross_together_in_whole_slices(links, monkeypatch):
    """Each call of the network costs both sides; a tensor is often shorter than a slice."""
    calls, send = [], Connection.send

    def counted(connection, data, deadline):
        calls.append(len(data))
        send(connection, data, deadline)

    monkeypatch.setattr(Connection, "send", counted)
    pieces = [bytes([number]) * (SLICE_BYTES // 2) for number in range(5)]
    sending = Outcome(links[0].send, pieces, PATIENCE_S)
    assert links[1].receive(sum(map(len, pieces)), PATIENCE_S) == b"".join(pieces)
    sending.join()
    assert calls == [SLICE_BYTES, SLICE_BYTES, SLICE_BYTES // 2, TAG_BYTES]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_changed_bit_is_noticed(links, pair, seed):
    random_ = random.Random(seed)
    wire = bytearray(sealed(links[0], b"weights"))
    wire[random_.randrange(len(wire))] ^= 1 << random_.randrange(8)
    pair[0].send(wire, soon())
    with pytest.raises(LinkError, match="message 1 is not what the other side has sent"):
        links[1].receive(7, PATIENCE_S)


def test_a_message_that_is_sent_twice_is_noticed(links, pair):
    message = sealed(links[0], b"weights")
    pair[0].send(message * 2, soon())
    assert links[1].receive(7, PATIENCE_S) == b"weights"
    with pytest.raises(LinkError, match="message 2"):
        links[1].receive(7, PATIENCE_S)


def test_what_one_side_sent_cannot_be_sent_back_to_it(links, pair):
    links[1].send([b"weights"], PATIENCE_S)
    pair[0].send(pair[0].receive(TAG_BYTES + 7, soon()), soon())
    with pytest.raises(LinkError, match="message 1"):
        links[1].receive(7, PATIENCE_S)


def test_another_message_than_the_expected_is_noticed(links):
    links[0].send([b"weights"], PATIENCE_S)
    links[0].send([b"weights"], PATIENCE_S)
    with pytest.raises(LinkError, match="message 1"):
        links[1].receive(5, PATIENCE_S)


@pytest.mark.parametrize("room", ["handshake", "connection", "link", "link_listener", "nccl_group"])
def test_nothing_here_reads_more_than_numbers_and_bytes(room):
    """By construction: no pickle, no JSON and no store in what bytes of the network pass through."""
    source = Path(handshake.__file__).with_name(f"{room}.py").read_text()
    imported = {name for line in source.splitlines() if line.startswith(("import ", "from ")) for name in line.split()}
    assert not imported & {"pickle", "json", "marshal", "StatelessProcessGroup", "TCPStore", "torch.distributed"}
    assert not re.search(r"pickle|TCPStore|StatelessProcessGroup|\beval\(|\bexec\(", source)
