"""One group for the workers of all servers: each byte leaves the learner once; after a break each has its own."""

import pytest
import torch

from stage2_trainer.process.background import all_at_once, in_background
from stage2_trainer.sync.transports.nccl_group import GROUP_ENDED, OneGroup
from stage2_trainer.sync.transports.transfer import Packed
from stage2_trainer.wire.errors import LinkError, ServerError
from tests.support.ports import free_port
from tests.support.socket_communicator import SocketCommunicator
from tests.unit.trainer.sync.transports.ends import (
    CPU,
    Client,
    in_thread,
    metas_of,
    nccl_receiver,
    nccl_transfer,
    outcome_of,
)

WORKERS = (1, 2, 1)
BUCKET = torch.arange(48, dtype=torch.uint8)
METAS = metas_of({"weight": BUCKET})


class Counted(SocketCommunicator):
    """A communicator that notes its rank, and what the learner sends by it."""

    ranks: list[int]
    broadcasts: list[int]

    def open(self, unique_id, rank, world_size):
        self.ranks.append(rank)
        super().open(unique_id, rank, world_size)

    def broadcast(self, buffer, ready):
        if self._rank == 0:
            self.broadcasts.append(len(buffer))
        super().broadcast(buffer, ready)


class Servers:
    """Some servers, each with workers, and the learner's transfer to each, all with seats in one group."""

    def __init__(self, token, workers, timeout_s=10.0):
        self.kind = type("Noted", (Counted,), {"ranks": [], "broadcasts": []})
        self.group = OneGroup(len(workers), communicator=lambda: self.kind(CPU), timeout_s=timeout_s)
        self.clients = [Client([nccl_receiver(self.kind) for _ in range(count)]) for count in workers]
        self.transfers = [
            nccl_transfer(free_port(), token, self.kind, timeout_s, shared=(self.group, seat))
            for seat in range(len(workers))
        ]

    def connect(self):
        calls = [in_background(t.connect, client) for t, client in zip(self.transfers, self.clients, strict=True)]
        if failed := [error for error in [call.exception() for call in calls] if error]:
            raise failed[0]

    def sent(self):
        return sum(transfer.sent for transfer in self.transfers)

    def push(self):
        """Send a bucket to all; returns what each worker has then."""
        received, threads = [], []
        for transfer, client in zip(self.transfers, self.clients, strict=True):
            for worker in client.receivers:
                received.append({})
                threads.append(in_thread(worker.receive, METAS, received[-1].update, transfer.group))
        packed = Packed([BUCKET])
        all_at_once(lambda transfer: transfer.send(packed), self.transfers)
        for thread in threads:
            thread.join()
        return received


@pytest.fixture
def make_servers(token):
    made = []

    def make(workers=WORKERS, **options):
        made.append(Servers(token, workers, **options))
        return made[-1]

    yield make
    for servers in made:
        for transfer in servers.transfers:
            transfer.close()


def test_shared_group_sends_each_bucket_once_to_every_worker(make_servers):
    servers = make_servers()
    servers.connect()
    for _ in range(2):
        before = servers.sent()
        received = servers.push()
        assert servers.sent() - before == len(BUCKET)
        assert len(received) == sum(WORKERS)
        assert all(torch.equal(got["weight"], BUCKET) for got in received)
    assert servers.kind.broadcasts == [len(BUCKET)] * 2
    assert sorted(servers.kind.ranks) == [0, 1, 2, 3, 4]


class Silent(Client):
    """A server that answers nothing."""

    def world_size(self):
        raise ServerError(self.base_url, "connect", "does not answer")


def test_missing_server_leaves_others_with_separate_groups(make_servers, caplog):
    servers = make_servers()
    servers.clients[1] = Silent([])
    with pytest.raises(ServerError, match="does not answer"):
        servers.connect()
    assert "each server has an NCCL group of its own" in caplog.text
    assert servers.group.ended
    del servers.transfers[1], servers.clients[1]
    assert all(torch.equal(got["weight"], BUCKET) for got in servers.push())
    assert servers.kind.broadcasts == [len(BUCKET)] * 2


def test_worker_leaving_during_push_ends_shared_group_and_servers_reconnect_separately(make_servers):
    servers = make_servers()
    servers.connect()
    great = Packed([torch.zeros(2**28, dtype=torch.uint8)])
    sending = [outcome_of(transfer.send, great) for transfer in servers.transfers]
    servers.clients[0].receivers[0].leave_group()
    for thread, errors in sending:
        thread.join(15)
        assert not thread.is_alive()
        assert len(errors) == 1
    for transfer in servers.transfers:
        transfer.disconnect()
    assert servers.group.ended
    servers.connect()
    assert all(torch.equal(got["weight"], BUCKET) for got in servers.push())
    assert servers.kind.broadcasts[-3:] == [len(BUCKET)] * 3


def test_stalled_server_in_shared_group_times_out(make_servers):
    servers = make_servers()
    servers.connect()
    great = Packed([torch.zeros(2**28, dtype=torch.uint8)])
    with pytest.raises(LinkError, match=r"a bucket was not received within 10 s"):
        all_at_once(lambda transfer: transfer.send(great), servers.transfers)


def test_waiting_for_other_servers_ends_with_shared_group(make_servers):
    group = make_servers().group
    waiting, errors = outcome_of(group.ranks, 0, 1)
    group.end()
    waiting.join(15)
    assert not waiting.is_alive()
    assert str(errors[0]) == GROUP_ENDED
