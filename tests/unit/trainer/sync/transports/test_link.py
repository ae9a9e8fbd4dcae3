"""Links, and the learner's port for them: workers of the job get in through any crowd, and nobody else does."""

import contextlib
import random
import socket
import threading
import time
import uuid

import pytest

from stage2_trainer.process.background import in_background
from stage2_trainer.sync.transports import link, transfer
from stage2_trainer.sync.transports.link import (
    HELLO_BYTES,
    MAGIC,
    PROOF_BYTES,
    SLICE_BYTES,
    GroupInfo,
    Link,
    Member,
    address_towards,
    dial,
    new_group_name,
)
from stage2_trainer.sync.transports.transfer import LinkListener
from stage2_trainer.wire.credentials import own_certificate
from stage2_trainer.wire.errors import LinkError
from tests.support import certificates
from tests.support.patience import Patience
from tests.support.recorder import recording

LOOPBACK = "127.0.0.1"
TOKEN = "a-token"
SEEDS = range(20)
PATIENCE_S = 20.0
GROUP = uuid.UUID(int=7).hex


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("tls"))


class Job:
    """What both ends know: the token, and over TLS their certificates."""

    def __init__(self, files=None, authority=None):
        self.certificate = own_certificate(files.environment()) if files else None
        self.context = self.certificate.learner_context((authority or files).trust()) if files else None
        self.fingerprint = self.certificate.fingerprint() if files else ""

    def listen(self, port):
        return LinkListener(LOOPBACK, port, TOKEN, self.context)

    def dial(self, port, member, *, token=TOKEN, timeout_s=PATIENCE_S, **other):
        options = {"certificate": self.fingerprint, "own": self.certificate, **other}
        info = GroupInfo("tcp", LOOPBACK, port, 2, 1, member.group, timeout_s, certificate=options["certificate"])
        return dial(info, member.rank, token=token, certificate=options["own"])


@pytest.fixture(params=["plain", "tls"])
def job(request, files):
    return Job(files if request.param == "tls" else None)


@pytest.fixture
def tls(files):
    return Job(files)


def connected(wrap=(None, None)):
    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen()
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    learner, worker = wrap
    if learner is not None:
        ours = learner.wrap_socket(ours, server_side=True, do_handshake_on_connect=False)
    if worker is not None:
        theirs = worker.wrap_socket(theirs, do_handshake_on_connect=False)
    return ours, theirs


@pytest.fixture
def pair():
    """The learner's link and the raw socket of whoever has dialled it, without TLS."""
    ours, theirs = connected()
    with contextlib.closing(Link(ours)) as learner, theirs:
        theirs.settimeout(PATIENCE_S)
        yield learner, theirs


@pytest.fixture
def links(job):
    """Both ends of a link whose members have proved themselves."""
    ours, theirs = connected((job.context, job.certificate.worker_context() if job.certificate else None))
    learner, worker = Link(ours), Link(theirs)
    admitted = in_background(learner.admit, TOKEN, lambda _: True, PATIENCE_S)
    worker.introduce(TOKEN, Member(GROUP, 1), job.fingerprint, time.monotonic() + PATIENCE_S)
    assert admitted.result(PATIENCE_S) == Member(GROUP, 1)
    yield learner, worker
    learner.close()
    worker.close()


def members(count):
    group = new_group_name()
    return [Member(group, rank) for rank in range(1, count + 1)]


def hello(member, token=TOKEN):
    claim = MAGIC + member.to_bytes()
    return claim + link._proof(token, link.WORKER, claim)


def admission(learner, token=TOKEN, is_expected=lambda _: True, timeout_s=PATIENCE_S):
    return in_background(learner.admit, token, is_expected, timeout_s)


def refusal(future):
    error = future.exception(PATIENCE_S)
    assert isinstance(error, LinkError)
    return str(error)


# Admission


def test_group_names_are_unique():
    assert len({new_group_name() for _ in range(1000)}) == 1000


def test_worker_and_learner_prove_token_to_each_other(pair):
    learner, stranger = pair
    member = Member(GROUP, 3)
    admitted = admission(learner)
    stranger.sendall(hello(member))
    assert admitted.result(PATIENCE_S) == member
    assert stranger.recv(PROOF_BYTES) == link._proof(TOKEN, link.LEARNER, MAGIC + member.to_bytes())


@pytest.mark.parametrize("seed", SEEDS)
def test_hello_with_flipped_bit_is_refused(pair, seed):
    random_ = random.Random(seed)
    changed = bytearray(hello(Member(GROUP, seed)))
    changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
    admitted = admission(pair[0])
    pair[1].sendall(changed)
    assert "does not prove the job's token" in refusal(admitted)


@pytest.mark.parametrize(
    "sent",
    [hello(Member(GROUP, 1), "another"), b"GET / HTTP/1.1\r\n\r\n" * 10, b"\x80\x04\x95" * 40, bytes(2**16)],
    ids=["another token", "HTTP", "a pickle", "a huge message"],
)
def test_invalid_hello_is_refused_without_answer(pair, sent):
    learner, stranger = pair
    admitted = admission(learner)
    stranger.sendall(sent)
    assert "does not prove" in refusal(admitted)
    learner.close()
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""


def test_unexpected_member_is_refused(pair):
    admitted = admission(pair[0], is_expected=lambda member: member.rank == 2)
    pair[1].sendall(hello(Member(GROUP, 1)))
    assert "nobody expects" in refusal(admitted)


@pytest.mark.parametrize("sent", [b"", MAGIC, hello(Member(GROUP, 1))[:-1]])
def test_incomplete_hello_is_refused(pair, sent):
    admitted = admission(pair[0])
    pair[1].sendall(sent)
    pair[1].close()
    assert "closed" in refusal(admitted)


@pytest.mark.parametrize("drips", [False, True])
def test_silent_or_dripping_connection_is_refused_at_deadline(pair, drips):
    admitted, dripped = admission(pair[0], timeout_s=0.3), 0  # by the clock: the hello is never whole
    while not admitted.done() and dripped < HELLO_BYTES - 1:
        if drips:
            pair[1].sendall(b"\0")
        dripped += 1
        time.sleep(0.02)
    assert "not in time" in refusal(admitted)


@pytest.mark.parametrize("answer", ["its own proof", "zeros", "nothing"])
def test_worker_refuses_listener_without_token(answer):
    ours, theirs = connected()
    with contextlib.closing(Link(theirs)) as worker, ours:
        asking = in_background(worker.introduce, TOKEN, Member(GROUP, 1), "", time.monotonic() + PATIENCE_S)
        received = ours.recv(HELLO_BYTES, socket.MSG_WAITALL)
        if answer != "nothing":
            ours.sendall(received[-PROOF_BYTES:] if answer == "its own proof" else bytes(PROOF_BYTES))
        ours.shutdown(socket.SHUT_WR)
        assert refusal(asking)


def test_member_round_trips_any_bytes_of_its_size():
    for seed in SEEDS:
        data = random.Random(seed).randbytes(Member.SIZE)
        assert Member.from_bytes(data).to_bytes() == data


# Messages


@pytest.mark.parametrize(
    "sizes", [[1], [0, 7, 0], [SLICE_BYTES + 3], [SLICE_BYTES, 1, 2, SLICE_BYTES - 1, 5], [9] * 3000, []]
)
def test_message_arrives_unchanged_in_any_pieces(links, sizes):
    pieces = [random.Random(size).randbytes(size) for size in sizes]
    before = links[0].sent
    sending = in_background(links[0].send, pieces, PATIENCE_S)
    assert links[1].receive(sum(sizes), PATIENCE_S) == b"".join(pieces)
    sending.result(PATIENCE_S)
    assert links[0].sent - before == sum(sizes)


def test_send_and_receive_time_out(links):
    with pytest.raises(LinkError, match="not in time"):
        links[1].receive(1, 0.1)
    with pytest.raises(LinkError, match="not in time"):
        links[0].send([bytes(2**27)], 0.2)
    assert links[0].sent < 2**27


@pytest.mark.parametrize("end", ["abort", "close"])
def test_closing_link_ends_waits_on_both_sides(links, end):
    waiting = [in_background(links[1].receive, 1, PATIENCE_S), in_background(links[0].receive, 1, PATIENCE_S)]
    time.sleep(0.05)  # by the clock: by then both wait; if not yet, they end alike
    getattr(links[0], end)()
    for one in waiting:
        assert "closed" in refusal(one) or "broke" in refusal(one)
    with pytest.raises(LinkError):
        links[0].send([b"x"], PATIENCE_S)


def test_link_is_lost_only_after_other_side_has_closed(links):
    assert not links[0].is_lost()
    assert not links[1].is_lost(), "also not by what TLS sends of its own"
    links[1].close()
    patience = Patience(PATIENCE_S)
    while not links[0].is_lost():
        assert not patience.ended()
        time.sleep(0.01)
    assert links[1].is_lost()


# TLS


@contextlib.contextmanager
def through(job, port, **options):
    """A link of a worker that dials through someone, with both its ends."""
    with contextlib.closing(job.listen(port)) as listener, recording(port, **options) as between:
        (member,) = members(1)
        listener.expect([member])
        with contextlib.closing(job.dial(between.port, member)) as worker:
            (learner,) = listener.take(PATIENCE_S, lambda: None)
            with contextlib.closing(learner):
                yield learner, worker, between.heard


def test_tls_hides_weights_and_proofs_from_eavesdropper(job, port):
    with through(job, port) as (learner, worker, heard):
        learner.send([b"weights" * 1000], PATIENCE_S)
        worker.receive(7000, PATIENCE_S)
    assert (b"weights" not in heard) == (MAGIC not in heard) == (job.certificate is not None)
    assert TOKEN.encode() not in heard


def test_tls_detects_changed_byte(tls, port):
    with through(tls, port, change_from=8192) as (learner, worker, _):
        learner.send([b"weights" * 3000], PATIENCE_S)
        with pytest.raises(LinkError, match="broke"):
            worker.receive(21_000, PATIENCE_S)


@pytest.fixture
def guarded(tls, port):
    listener = tls.listen(port)
    (member,) = members(1)
    listener.expect([member])
    yield listener, member
    listener.close()


@pytest.mark.parametrize("shown", ["another authority's", "none"])
def test_tls_refuses_worker_without_certificate_of_job(guarded, tls, port, tmp_path, shown):
    listener, member = guarded
    own = own_certificate(certificates.make(tmp_path).environment())
    if shown == "none":
        context = own.worker_context()
        context = type(context)(context.protocol)
        context.check_hostname, context.verify_mode = False, 0
        own = type("Bare", (), {"worker_context": lambda _: context})()
    with pytest.raises(LinkError, match=r"certificate required|unknown ca|broke"):
        tls.dial(port, member, own=own)
    assert "certificate" in listener.last_refusal


def test_worker_without_tls_is_refused_by_tls_learner(guarded, tls, port):
    with pytest.raises(LinkError):
        tls.dial(port, guarded[1], certificate="")


def test_worker_sends_proof_only_to_announced_certificate(guarded, tls, port, tmp_path):
    other = own_certificate(certificates.make(tmp_path).environment())
    with pytest.raises(LinkError, match="another certificate than"):
        tls.dial(port, guarded[1], certificate=other.fingerprint())


def test_server_without_certificate_reports_missing_certificate(tls, port):
    with pytest.raises(ValueError, match="this server has no certificate"):
        tls.dial(port, members(1)[0], own=None)


# The port


@pytest.fixture
def listener(job, port):
    listener = job.listen(port)
    yield listener
    listener.close()


def dial_all(job, port, expected):
    """Dial for every member at once; returns the links that come of it."""
    links = []

    def dial_one(member):
        with contextlib.suppress(LinkError):
            links.append(job.dial(port, member))

    for member in expected:
        threading.Thread(target=dial_one, args=(member,), daemon=True).start()
    return links


def accepted(listener):
    return listener.take(PATIENCE_S, lambda: None)


def test_workers_come_in_any_order_and_are_taken_by_rank(listener, job, port):
    expected = members(5)
    listener.expect(expected)
    links = {member.rank: job.dial(port, member) for member in reversed(expected)}
    for rank, one in enumerate(accepted(listener), start=1):
        one.send([bytes([rank])], PATIENCE_S)
        assert links[rank].receive(1, PATIENCE_S) == bytes([rank])


def test_learner_listens_only_on_address_that_servers_dial(listener, port):
    try:
        own = address_towards("192.0.2.1", 9)
    except OSError:
        pytest.skip("this machine has no other address")
    if own != LOOPBACK:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((own, port), timeout=PATIENCE_S)


def test_port_in_use_fails_at_once_and_closed_port_is_free(job, port, squatter):
    for _ in range(3):
        job.listen(port).close()
    squatter(port)
    with pytest.raises(OSError, match="in use"):
        job.listen(port)


@pytest.mark.parametrize("sent", [b"", b"\0"], ids=["silent", "dripping"])
def test_many_idle_connections_do_not_keep_workers_out(listener, job, port, monkeypatch, sent):
    monkeypatch.setattr(transfer, "MAX_HALF_OPEN", 8)
    expected = members(3)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S)).sendall(sent)
        listener.expect(expected)
        dialled = dial_all(job, port, expected)
        assert len(accepted(listener)) == 3
        assert len(dialled) <= 3
        assert len(listener._half_open) <= 8


def test_silent_connection_is_closed_at_deadline_without_data(listener, port, monkeypatch):
    monkeypatch.setattr(transfer, "ADMISSION_TIMEOUT_S", 0.2)  # by the clock: it never says anything
    listener.expect(members(1))
    with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as silent:
        assert silent.recv(4096) == b""


def test_unauthenticated_connection_cannot_fill_learner_memory(listener, port):
    poured = 0
    with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as stranger, contextlib.suppress(OSError):
        while poured < 2**28:
            poured += stranger.send(bytes(2**16))
    assert poured < 2**25, "the kernel's buffers, and no more"


def test_only_expected_worker_with_token_takes_its_place(listener, job, port):
    """Without the token, with the token for another group, for another rank, and for one that has come already."""
    (member,) = members(1)
    listener.expect([member])
    others = [("another", member), (TOKEN, Member(new_group_name(), 1)), (TOKEN, Member(member.group, 2))]
    for token, other in others:
        with pytest.raises(LinkError, match=r"closed|broke"):
            job.dial(port, other, token=token)
    first = job.dial(port, member)
    (ours,) = accepted(listener)
    with pytest.raises(LinkError, match=r"closed|broke"):  # at the latest of its first message
        job.dial(port, member).receive(1, PATIENCE_S)
    ours.send([b"a"], PATIENCE_S)
    assert first.receive(1, PATIENCE_S) == b"a"


def test_wait_for_workers_ends_on_error_of_server(listener):
    listener.expect(members(1))

    def refused():
        raise RuntimeError("the server answered 500")

    with pytest.raises(RuntimeError, match="answered 500"):
        listener.take(30, refused)
    with pytest.raises(TimeoutError):
        listener.take(0.1, lambda: None)


def test_refused_connection_error_names_learner_address(job, port):
    with pytest.raises(LinkError, match=rf"learner at 127.0.0.1:{port}: the connection broke: Connection refused"):
        job.dial(port, members(1)[0])


def test_error_of_accept_does_not_stop_listener(listener, job, port):
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
    dial_all(job, port, expected * 2)
    assert len(accepted(listener)) == 1
    listener._socket = real
