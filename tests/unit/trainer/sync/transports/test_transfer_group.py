"""The transfer group: learner and workers find one another, bytes arrive, and waits end."""

import threading
from types import SimpleNamespace

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.sync.fleet.server import transfer_for
from stage2_trainer.sync.tensors.announcement import TensorMeta
from stage2_trainer.sync.transports import receiver
from stage2_trainer.sync.transports.link import PROOF_BYTES, GroupInfo
from stage2_trainer.sync.transports.receiver import Buffers
from stage2_trainer.sync.transports.transfer import Packed
from stage2_trainer.wire.errors import LinkError, OtherGroupError, RepeatedCallError, ServerError
from tests.unit.trainer.sync.transports.ends import (
    LIMIT,
    Client,
    arrives,
    in_thread,
    metas_of,
    nccl_receiver,
    nccl_transfer,
    outcome_of,
    received,
    send_all,
    tcp_receiver,
    tcp_transfer,
)


@pytest.fixture
def transfer(port, token):
    transfer = tcp_transfer(port, token)
    yield transfer
    transfer.close()


@pytest.fixture(params=[(tcp_transfer, tcp_receiver), (nccl_transfer, nccl_receiver)], ids=["tcp", "nccl"])
def ends(request, port, token):
    """A transfer over each transport, and a function that creates a worker of it."""
    create, create_receiver = request.param
    transfer = create(port, token)
    yield transfer, create_receiver
    transfer.close()


TENSORS = {f"t{i}": torch.randn(i + 1, 3) for i in range(9)}


@pytest.mark.parametrize("workers", [1, 3])
def test_every_worker_receives_every_tensor_also_after_rejoin(ends, workers):
    transfer, create_receiver = ends
    receivers = [create_receiver() for _ in range(workers)]
    for _ in range(2):
        transfer.connect(Client(receivers))
        for _ in range(2):
            for got in received(transfer, receivers, TENSORS):
                assert got.keys() == TENSORS.keys()
                assert all(torch.equal(got[name], TENSORS[name]) for name in TENSORS)
        transfer.disconnect()


@pytest.mark.parametrize("leave", ["disconnect", "aborter"])
def test_learner_that_leaves_ends_wait_of_workers(ends, leave):
    transfer, create_receiver = ends
    worker = create_receiver()
    transfer.connect(Client([worker]))
    thread, errors = outcome_of(worker.receive, [TensorMeta("t", torch.float32, (4,))], print, transfer.group)
    (transfer.aborter() if leave == "aborter" else transfer.disconnect)()
    thread.join(15)
    assert not thread.is_alive()
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("create", "create_receiver", "fault"),
    [
        (tcp_transfer, tcp_receiver, "not in time"),
        (nccl_transfer, nccl_receiver, r"a bucket was not received within 10 s"),
    ],
)
def test_send_to_stalled_worker_times_out(port, token, create, create_receiver, fault):
    transfer, stands_still = create(port, token, timeout_s=10.0), create_receiver()
    transfer.connect(Client([stands_still]))
    with pytest.raises(LinkError, match=fault):
        transfer.send(Packed([torch.zeros(2**28, dtype=torch.uint8)]))
    stands_still.leave_group()
    transfer.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_sent_bytes_count_tensors_of_every_worker_and_proofs(transfer, workers):
    nbytes = sum(tensor.nbytes for tensor in TENSORS.values())
    receivers = [tcp_receiver() for _ in range(workers)]
    for times in (1, 2):
        transfer.connect(Client(receivers))
        received(transfer, receivers, TENSORS)
        transfer.disconnect()
        assert transfer.sent == times * workers * (nbytes + PROOF_BYTES)


def test_port_in_use_error_names_address(transfer, port, squatter):
    squatter(port)
    with pytest.raises(ServerError, match=rf"127.0.0.1:{port}.*in use"):
        transfer.connect(Client([tcp_receiver()]))


def test_waiting_for_workers_times_out(port, token):
    transfer = tcp_transfer(port, token, timeout_s=0.2)  # by the clock: nobody dials
    nobody = SimpleNamespace(base_url=Client.base_url, world_size=lambda: 2, post=lambda *_, **__: None)
    with pytest.raises(ServerError, match=rf"not all of its 2 workers dialled 127.0.0.1:{port} within 0.2 s"):
        transfer.connect(nobody)
    transfer.close()


def test_refusal_by_server_ends_wait_for_its_workers(transfer):
    def refuse(*_, **__):
        raise ServerError("s", "connect", "the server answered 500")

    client = SimpleNamespace(base_url=Client.base_url, world_size=lambda: 1, post=refuse)
    with pytest.raises(ServerError, match="answered 500"):
        transfer.connect(client)


def test_late_join_of_earlier_group_changes_nothing(transfer):
    calls = []
    client = Client([tcp_receiver()])

    def post(path, phase, *, body):
        info = GroupInfo(**body["init_info"])
        calls.append(info)
        if len(calls) == 1:
            raise ServerError("s", "connect", "this server was too slow")
        client.receivers[0].join(info, 1)

    stub = SimpleNamespace(base_url=Client.base_url, world_size=lambda: 1, post=post)
    with pytest.raises(ServerError, match="too slow"):
        transfer.connect(stub)
    transfer.connect(stub)
    with pytest.raises(LinkError, match="closed"):
        client.receivers[0].join(calls[0], 1)
    arrives(transfer, client.receivers[0])


def test_overtaken_join_does_not_leave_newer_group(transfer, monkeypatch):
    """A worker may be let into a group just before it is given up, and come to know that after it is in the next."""
    worker, let_in, go_on, failures, dial = (tcp_receiver(), threading.Event(), threading.Event(), [], receiver.dial)

    def linger(*arguments, **options):
        link = dial(*arguments, **options)
        if not let_in.is_set():
            let_in.set()
            go_on.wait(20)
        return link

    def join(info):
        try:
            worker.join(info, 1)
        except LinkError as error:
            failures.append(error)

    monkeypatch.setattr(receiver, "dial", linger)
    threads = []

    def post(path, phase, *, body):
        threads.append(in_thread(join, GroupInfo(**body["init_info"])))
        if len(threads) > 1:
            threads[1].join()

    stub = SimpleNamespace(base_url=Client.base_url, world_size=lambda: 1, post=post)
    for _ in range(2):
        transfer.connect(stub)
        assert let_in.wait(20)
    go_on.set()
    threads[0].join()
    assert ["called again" in str(failure) for failure in failures] == [True]
    arrives(transfer, worker)


def test_late_receive_of_other_group_is_refused_without_consuming_data(transfer):
    """A learner was killed while its call waited in the server's queue, and its successor has formed a group."""
    worker = tcp_receiver()
    client = Client([worker])
    transfer.connect(client)
    earlier = transfer.group
    transfer.connect(client)
    with pytest.raises(OtherGroupError, match=rf"in group '{earlier}'.*joined '{transfer.group}'"):
        worker.receive([TensorMeta("t", torch.float32, (4,))], print, earlier)
    arrives(transfer, worker)


def test_worker_accepts_each_call_number_once_in_increasing_order(transfer):
    worker = tcp_receiver()
    transfer.connect(Client([worker]))
    worker.accept(transfer.group, 2)
    for number in (2, 1):
        with pytest.raises(RepeatedCallError, match=rf"call {number} .*with call 2 or before"):
            worker.accept(transfer.group, number)
    worker.accept(transfer.group, 3)
    transfer.connect(Client([worker]))
    worker.accept(transfer.group, 1)


def test_learner_with_other_transport_is_refused():
    info = GroupInfo("nccl", "127.0.0.1", 1, 2, LIMIT, "0" * 32, 1.0)
    with pytest.raises(ValueError, match=r"over nccl and this server receives them over tcp.*sync\.transport"):
        tcp_receiver().join(info, 1)


@pytest.mark.parametrize("requested", ["auto", "tcp"])
def test_weights_in_main_memory_go_over_tcp(port, token, requested):
    chosen = transfer_for(
        torch.device("cpu"), port, requested=requested, token=token, bucket_bytes=LIMIT, timeout_s=60.0
    )
    assert chosen.transport == "tcp"


def test_nccl_without_gpu_is_refused(port, token):
    with pytest.raises(ConfigError, match=r"sync\.transport.*NCCL needs a learner on a GPU"):
        transfer_for(torch.device("cpu"), port, requested="nccl", token=token, bucket_bytes=LIMIT, timeout_s=60.0)


def test_receiving_without_group_is_refused():
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine comes first"):
        tcp_receiver().receive([], print, group="")


def test_aborting_earlier_group_does_not_end_next_group(transfer):
    """A call about an earlier group may fail long after a new one has been formed."""
    worker = tcp_receiver()
    client = Client([worker])
    transfer.connect(client)
    end_the_first = transfer.aborter()
    transfer.disconnect()
    transfer.connect(client)
    end_the_first()
    arrives(transfer, worker)


def test_load_error_of_worker_ends_send_of_learner(transfer):
    worker = tcp_receiver()
    transfer.connect(Client([worker]))
    tensors = {f"t{i}": torch.zeros(2**20) for i in range(4)}

    def load(_):
        raise KeyError("no such layer")

    failures = []

    def work():
        try:
            worker.receive(metas_of(tensors), load, transfer.group)
        except KeyError as error:
            failures.append(error)

    thread = in_thread(work)
    with pytest.raises(LinkError):  # noqa: PT012  # whichever bucket is the first that is not taken
        for _ in range(100):
            send_all(transfer, tensors)
    thread.join(15)
    assert len(failures) == 1


def test_buffer_is_reused_only_when_no_tensor_references_it():
    buffers = Buffers()
    first = buffers.take(16)
    kept = first[:4].view(torch.float32)
    address = first.data_ptr()
    del first
    second = buffers.take(16)
    assert second.data_ptr() != address
    del kept
    assert buffers.take(8).data_ptr() == address
    del second
    assert len({buffers.take(1024).data_ptr(), address}) == 2
