"""The transfer group: learner and workers find one another, bytes arrive, and waits end."""

import socket
import threading
import uuid

import pytest
import torch

from stage2_trainer.engine.gloo_receiver import Receiver
from stage2_trainer.wire import gloo_group as gloo
from stage2_trainer.wire.buckets import TensorMeta, bucket_bytes, pack, plan_buckets

LOOPBACK = "127.0.0.1"
LIMIT = 64


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def group_info(port, world_size=2, timeout_s=10.0):
    return gloo.GroupInfo(
        master_address=LOOPBACK,
        master_port=port,
        world_size=world_size,
        packed_buffer_size_bytes=LIMIT,
        name=uuid.uuid4().hex,
        timeout_s=timeout_s,
    )


def in_thread(step, *arguments):
    thread = threading.Thread(target=step, args=arguments)
    thread.start()
    return thread


def test_every_worker_receives_every_tensor(port):
    tensors = {f"t{i}": torch.randn(i + 1, 3) for i in range(9)}
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    info = group_info(port, world_size=3)
    received = {1: {}, 2: {}}

    def work(rank):
        receiver = Receiver()
        receiver.join(info, rank)
        receiver.receive(metas, received[rank].update)
        receiver.leave()

    store = gloo.open_store(LOOPBACK, port, 10)
    threads = [in_thread(work, rank) for rank in received]
    gloo.wait_for_workers(store, info, 10, lambda: None)
    group = gloo.GlooGroup(store, info, gloo.LEARNER_RANK)
    stream = iter(tensors.items())
    for bucket in plan_buckets(metas, LIMIT):
        group.broadcast(pack(bucket, stream, torch.empty(bucket_bytes(bucket), dtype=torch.uint8))).wait()
    for thread in threads:
        thread.join()
    group.close()
    for got in received.values():
        assert got.keys() == tensors.keys()
        assert all(torch.equal(got[name], tensors[name]) for name in tensors)


def test_the_store_listens_on_the_one_address_that_servers_dial(port):
    store = gloo.open_store(LOOPBACK, port, 5)
    own = gloo.address_towards("192.0.2.1", 9) if _has_route() else None
    if own not in (None, LOOPBACK):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((own, port), timeout=2)
    socket.create_connection((LOOPBACK, port), timeout=2).close()
    del store


def _has_route():
    try:
        gloo.address_towards("192.0.2.1", 9)
    except OSError:
        return False
    return True


def test_a_port_in_use_is_an_error_at_once(port):
    with socket.socket() as squatter:
        squatter.bind((LOOPBACK, port))
        squatter.listen()
        with pytest.raises(OSError, match="in use"):
            gloo.open_store(LOOPBACK, port, 5)


def test_a_worker_that_never_dials_in_is_waited_for_only_so_long(port):
    store = gloo.open_store(LOOPBACK, port, 5)
    with pytest.raises(TimeoutError, match=f"not all of its 1 workers dialled {LOOPBACK}:{port} within 0.2 s"):
        gloo.wait_for_workers(store, group_info(port), 0.2, lambda: None)


def test_a_server_that_refuses_ends_the_wait_for_its_workers(port):
    store = gloo.open_store(LOOPBACK, port, 5)

    def refused():
        raise RuntimeError("the server answered 500")

    with pytest.raises(RuntimeError, match="answered 500"):
        gloo.wait_for_workers(store, group_info(port), 30, refused)


def test_a_worker_of_an_earlier_group_is_not_counted(port):
    store = gloo.open_store(LOOPBACK, port, 5)
    earlier, now = group_info(port), group_info(port)
    gloo.announce(gloo.dial_store(earlier), earlier, 1)
    with pytest.raises(TimeoutError):
        gloo.wait_for_workers(store, now, 0.2, lambda: None)
    gloo.wait_for_workers(store, earlier, 5, lambda: None)


def test_tensors_without_a_group_are_refused():
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine comes first"):
        Receiver().receive([], print)


def test_a_learner_that_leaves_ends_the_wait_of_its_workers(port):
    info = group_info(port, timeout_s=20.0)
    failures = []

    def work():
        receiver = Receiver()
        receiver.join(info, 1)
        try:
            receiver.receive([TensorMeta("t", torch.float32, (4,))], print)
        except RuntimeError as error:
            failures.append(error)

    store = gloo.open_store(LOOPBACK, port, 10)
    thread = in_thread(work)
    gloo.wait_for_workers(store, info, 10, lambda: None)
    group = gloo.GlooGroup(store, info, gloo.LEARNER_RANK)
    group.close()
    thread.join(15)
    assert not thread.is_alive()
    assert len(failures) == 1
