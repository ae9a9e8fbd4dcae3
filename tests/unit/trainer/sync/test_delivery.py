"""A push to several servers: each is sent everything in order, memory is bounded, and who fails costs only itself."""

import threading
import weakref

import pytest
import torch

from stage2_trainer.sync.fleet import delivery
from stage2_trainer.sync.fleet.delivery import SHORT_BYTES, Packer, Shipment
from stage2_trainer.sync.fleet.push import send
from stage2_trainer.sync.fleet.server import Fleet, ServerSession, Update
from stage2_trainer.sync.tensors.merge import WeightEntry, WeightSource
from stage2_trainer.wire.errors import LinkError, ServerError

CPU = torch.device("cpu")
TENSORS = 12
BUCKET_BYTES = 4  # a bucket a tensor


class Transfer:
    """A transfer to a server that takes what it is sent, when it may."""

    transport, staging, group = "tcp", CPU, "first"

    def __init__(self):
        self.sent = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.breaks_at = None
        self.aborted = False

    def send(self, packed):
        assert self.may_go.wait(20)
        if len(self.sent) == self.breaks_at:
            raise LinkError("the connection broke")
        self.sent.append(b"".join(bytes(part.numpy()) for part in packed.parts))

    def abort(self):
        self.aborted = True
        self.may_go.set()

    def aborter(self):
        return self.abort

    def disconnect(self):
        self.abort()


class Client:
    timeout_s = 20.0

    def __init__(self, number):
        self.base_url = f"http://s{number}"
        self.answer = threading.Event()
        self.answer.set()
        self.refuses = None
        self.has_s = None

    def post(self, path, phase, *, timeout_s, **_):
        self.has_s = timeout_s
        assert self.answer.wait(20)
        if self.refuses:
            raise ServerError(self.base_url, phase, self.refuses, status=500)


class Servers(Fleet):
    """A fleet whose servers are here."""

    def __init__(self, count):
        self.sessions = [ServerSession(Client(number), Transfer()) for number in range(count)]
        self.packer = Packer(CPU, CPU)
        self.timeout_s, self.bucket_bytes = 20.0, BUCKET_BYTES

    def push_all(self, source):
        update = Update(self.sessions)
        send(self, Shipment(source), update.fit, update)
        return update


class Merging:
    """Weights that are merged when their turn comes, with a count of those that are still held."""

    def __init__(self):
        self.alive = weakref.WeakSet()
        self.merged = 0
        self.most_alive = 0

    def source(self):
        parameter = torch.zeros(2)
        return Counted(tuple(WeightEntry(f"t{i}", parameter, None, trains=True) for i in range(TENSORS)), self)

    def merge(self, number):
        value = torch.full((2,), float(number))
        self.alive.add(value.untyped_storage())
        self.merged += 1
        self.most_alive = max(self.most_alive, len(self.alive))
        return value


class Counted(WeightSource):
    """A stream whose tensors are merged by somebody who counts."""

    def __init__(self, entries, merging):
        super().__init__(entries)
        object.__setattr__(self, "merging", merging)

    def __iter__(self):
        for number, entry in enumerate(self.entries):
            yield entry.name, self.merging.merge(number)


EXPECTED = [bytes(torch.full((2,), float(i)).view(torch.uint8).numpy()) for i in range(TENSORS)]


@pytest.mark.parametrize("count", [1, 3, 16])
def test_every_server_is_sent_every_bucket_in_order(count):
    servers = Servers(count)
    update = servers.push_all(Merging().source())
    assert update.fit == servers.sessions
    assert [session.transfer.sent for session in servers.sessions] == [EXPECTED] * count
    assert {session.client.has_s for session in servers.sessions} == {servers.timeout_s * (TENSORS + 1)}


def test_packing_cpu_tensors_does_not_copy_them():
    parameter = torch.randn(3, 5)
    packed = Packer(CPU, CPU).pack(
        WeightSource((WeightEntry("t", parameter, None, trains=True),)).metadata(), iter([("t", parameter)]), None
    )
    assert packed.parts[0].data_ptr() == parameter.data_ptr()


def test_short_tensors_are_concatenated_and_long_ones_are_sent_in_place():
    sizes = [5, SHORT_BYTES - 1, 3, SHORT_BYTES, 2, SHORT_BYTES + 7, 4]
    entries = [WeightEntry(f"t{i}", torch.full((n,), i, dtype=torch.uint8), None, True) for i, n in enumerate(sizes)]
    source = WeightSource(tuple(entries))
    parts = Packer(CPU, CPU).pack(source.metadata(), iter(source), None).parts
    assert torch.equal(torch.cat(parts), torch.cat([entry.parameter for entry in entries]))
    assert [len(part) for part in parts] == [SHORT_BYTES + 4, 3, SHORT_BYTES, 2, SHORT_BYTES + 7, 4]
    assert parts[2].data_ptr() == entries[3].parameter.data_ptr()


def test_learner_computes_digests_while_tensors_are_being_sent(monkeypatch):
    servers = Servers(2)
    slow = servers.sessions[1].transfer
    slow.may_go.clear()
    monkeypatch.setattr(Shipment, "digest_what_servers_merge", lambda self: slow.may_go.set())
    update = servers.push_all(WeightSource((WeightEntry("t", torch.zeros(2), None, trains=True),)))
    assert update.fit == servers.sessions


def test_merging_runs_ahead_only_by_number_of_slots():
    servers, merging = Servers(2), Merging()
    slow = servers.sessions[1].transfer
    slow.may_go.clear()
    pushing = threading.Thread(target=servers.push_all, args=(merging.source(),))
    pushing.start()
    while len(servers.sessions[0].transfer.sent) < delivery.SLOTS:
        pushing.join(0.01)
    pushing.join(0.1)  # by the clock: nothing may happen; a slow machine can only miss the defect
    assert merging.merged == delivery.SLOTS
    slow.may_go.set()
    pushing.join(20)
    assert merging.most_alive <= delivery.SLOTS + 1
    assert [session.transfer.sent for session in servers.sessions] == [EXPECTED] * 2


@pytest.mark.parametrize("confirms", [False, True])
def test_server_with_broken_connection_is_dropped_without_affecting_others(confirms, monkeypatch):
    monkeypatch.setattr(delivery, "ANSWER_GRACE_S", 0.1)  # by the clock: its answer changes nothing
    servers = Servers(3)
    servers.sessions[1].transfer.breaks_at = 4
    if not confirms:
        servers.sessions[1].client.answer.clear()  # and does not say why
    update = servers.push_all(Merging().source())
    assert update.fit == [servers.sessions[0], servers.sessions[2]]
    assert [session.transfer.sent for session in update.fit] == [EXPECTED] * 2
    with pytest.raises(ServerError, match="server http://s1, phase push: tensors t4 to t4: the connection broke"):
        update.raise_failures()


def test_error_reported_by_server_takes_precedence_over_connection_error():
    servers = Servers(1)
    servers.sessions[0].transfer.breaks_at = 4
    servers.sessions[0].client.refuses = "there is no layer t3"
    with pytest.raises(ServerError, match="there is no layer t3"):
        servers.push_all(Merging().source()).raise_failures()


def test_refusal_by_server_aborts_transfer():
    servers = Servers(1)
    session = servers.sessions[0]
    session.transfer.may_go.clear()
    session.client.refuses = "there is no update"
    with pytest.raises(ServerError, match="there is no update"):
        servers.push_all(Merging().source()).raise_failures()
    assert session.transfer.aborted


def test_merging_stops_when_all_servers_are_lost():
    servers, merging = Servers(2), Merging()
    for session in servers.sessions:
        session.transfer.breaks_at = 0
    servers.push_all(merging.source())
    assert merging.merged <= delivery.SLOTS + 1


def test_server_that_does_not_confirm_times_out():
    servers = Servers(1)
    servers.timeout_s = 0.2  # by the clock: nobody confirms
    servers.sessions[0].client.answer.clear()
    with pytest.raises(ServerError, match=r"all tensors sent, but not confirmed within 0\.2 s"):
        servers.push_all(Merging().source()).raise_failures()
