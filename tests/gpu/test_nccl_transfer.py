"""Weights over NCCL, from a learner to a server's worker, both on one GPU.

NCCL refuses two ranks on one GPU where their host hash is equal, so each process has a host id of its own: both then
speak NCCL's socket transport over loopback, as two pods of one node do.
"""

import multiprocessing
import os
import threading
from functools import partial

import pytest
import torch

from stage2_api.pod.environment import TOKEN_FILE_VARIABLE
from stage2_trainer.engine.nccl import open_nccl
from stage2_trainer.engine.receiver import Receiver
from stage2_trainer.weights.packing import Packer
from stage2_trainer.weights.transfer.nccl import NcclTransfer
from stage2_trainer.weights.transfer.protocol import Packed
from stage2_trainer.weights.transfer.tcp import TcpTransfer
from stage2_trainer.wire.buckets import TensorMeta, plan_buckets
from stage2_trainer.wire.errors import LinkError
from stage2_trainer.wire.transfer_group import GroupInfo

pytestmark = pytest.mark.timeout(300)

NCCL_ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
BUCKET_BYTES = 64 * 2**20
TIMEOUT_S = 60.0


def serve(pipe, token_file):
    """Be a server's worker: join and receive as the pipe says, and tell what came, or what went wrong."""
    os.environ.update(NCCL_ENVIRONMENT, NCCL_HOSTID="pod-server", **{TOKEN_FILE_VARIABLE: token_file})
    receiver = Receiver("nccl", partial(open_nccl, device=torch.device("cuda:0")))
    while True:
        verb, body = pipe.recv()
        try:
            if verb == "join":
                receiver.join(GroupInfo(**body), 1)
                pipe.send(None)
            else:
                pipe.send(receive(receiver, *body))
        except LinkError as error:
            pipe.send(str(error))


def receive(receiver, metas, group):
    """Receive a push in a group; returns the sum of each tensor, which depends on every element."""
    got = {}
    receiver.receive(metas, lambda tensors: got.update({name: sum_of(tensor) for name, tensor in tensors}), group)
    return got


def sum_of(tensor):
    return tensor.double().sum().item()


class Client:
    """The server's routes, by a pipe."""

    base_url = "http://127.0.0.1:8000"

    def __init__(self, pipe):
        self.pipe = pipe

    def world_size(self):
        return 1

    def post(self, path, phase, *, body):
        self.pipe.send(("join", body["init_info"]))
        assert self.pipe.recv() is None


@pytest.fixture
def server(tmp_path):
    (tmp_path / "token").write_text("t")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, str(tmp_path / "token")), daemon=True)
    process.start()
    yield process, Client(ours)
    process.kill()
    process.join()


@pytest.fixture
def transfer(monkeypatch, free_port):
    for name, value in {**NCCL_ENVIRONMENT, "NCCL_HOSTID": "pod-learner"}.items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda:0")
    transfer = NcclTransfer(free_port, device=device, token="t", bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
    yield transfer
    transfer.close()


def weights():
    return {f"layer.{i}": torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16) for i in range(64)}


def push(transfer, tensors):
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    packer, stream = Packer(torch.device("cuda:0"), transfer.staging), iter(tensors.items())
    plan = list(plan_buckets(metas, BUCKET_BYTES))
    (slot,) = packer.slots(plan, 1)
    for bucket in plan:
        transfer.send(packer.pack(bucket, stream, slot))


def metas_of(tensors):
    return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def test_tensors_arrive_and_a_group_can_be_left_and_joined_again(server, transfer):
    _, client = server
    for _ in range(2):
        transfer.connect(client)
        for _ in range(2):
            tensors = weights()
            client.pipe.send(("receive", (metas_of(tensors), transfer.group)))
            push(transfer, tensors)
            assert client.pipe.recv() == {name: sum_of(tensor) for name, tensor in tensors.items()}
        transfer.disconnect()


def test_a_server_that_dies_in_a_push_is_noticed_at_once(server, transfer):
    process, client = server
    transfer.connect(client)
    client.pipe.send(("receive", (metas_of(weights()), transfer.group)))
    threading.Timer(0.2, process.kill).start()
    with pytest.raises(LinkError, match=r"left the group|NCCL"):  # noqa: PT012  # in whichever push it is
        while True:
            push(transfer, weights())
    transfer.disconnect()


def test_a_learner_that_leaves_in_a_push_frees_its_server(server, transfer):
    _, client = server
    transfer.connect(client)
    client.pipe.send(("receive", (metas_of(weights()), transfer.group)))
    transfer.send(Packed([torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device="cuda")]))
    transfer.disconnect()
    assert isinstance(client.pipe.recv(), str)
    transfer.connect(client)
    tensors = weights()
    client.pipe.send(("receive", (metas_of(tensors), transfer.group)))
    push(transfer, tensors)
    assert client.pipe.recv() == {name: sum_of(tensor) for name, tensor in tensors.items()}


def test_a_learner_on_a_gpu_packs_for_tcp_into_page_locked_memory():
    tensors = weights()
    packer = Packer(torch.device("cuda:0"), TcpTransfer.staging)
    plan = list(plan_buckets(metas_of(tensors), BUCKET_BYTES))
    (slot,) = packer.slots(plan, 1)
    assert slot is not None
    assert slot.is_pinned()
    stream = iter(tensors.items())
    for bucket in plan:
        packed = packer.pack(bucket, stream, slot)
        packed.ready.synchronize()
        expected = torch.cat([tensors[meta.name].flatten().view(torch.uint8) for meta in bucket])
        assert torch.equal(packed.parts[0], expected.cpu())
