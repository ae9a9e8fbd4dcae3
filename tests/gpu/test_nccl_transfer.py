"""Weights over NCCL, from a learner to a server's worker, both on one GPU (`bench.gpu_push`)."""

import threading

import pytest
import torch
from bench import gpu_push
from bench.gpu_push import metas_of, sum_of

from stage2_api.vllm import Transport
from stage2_trainer.sync.fleet.delivery import Packer
from stage2_trainer.sync.tensors.announcement import plan_buckets
from stage2_trainer.sync.transports.transfer import Packed, WeightTransfer
from stage2_trainer.wire.errors import LinkError
from tests.gpu.conftest import DEVICE, ON_GPU_ALONE

pytestmark = pytest.mark.timeout(300)

TRANSPORT: Transport = "nccl" if DEVICE.type == "cuda" else "tcp"
BUCKET_BYTES = 64 * 2**20


@pytest.fixture
def server():
    with gpu_push.server(TRANSPORT, DEVICE) as (process, client):
        yield process, client


@pytest.fixture
def transfer():
    with gpu_push.transfer(TRANSPORT, DEVICE, BUCKET_BYTES) as made:
        yield made


def weights():
    return {f"layer.{i}": torch.randn(4096, 1024, device=DEVICE, dtype=torch.bfloat16) for i in range(64)}


def push(transfer, tensors):
    gpu_push.push(transfer, tensors, DEVICE, BUCKET_BYTES)


def expect(client, transfer, tensors):
    client.pipe.send(("receive", (metas_of(tensors), transfer.group, True)))


def test_tensors_arrive_over_nccl_also_after_rejoining_group(server, transfer):
    _, client = server
    for _ in range(2):
        transfer.connect(client)
        for _ in range(2):
            tensors = weights()
            expect(client, transfer, tensors)
            push(transfer, tensors)
            assert client.pipe.recv() == {name: sum_of(tensor) for name, tensor in tensors.items()}
            assert transfer.sent >= sum(tensor.nbytes for tensor in tensors.values())
        transfer.disconnect()


@ON_GPU_ALONE
def test_server_killed_during_nccl_push_is_detected_at_once(server, transfer):
    process, client = server
    transfer.connect(client)
    expect(client, transfer, weights())
    threading.Timer(0.2, process.kill).start()
    with pytest.raises(LinkError, match=r"left the group|NCCL"):  # noqa: PT012  # in whichever push it is
        while True:
            push(transfer, weights())
    transfer.disconnect()


@ON_GPU_ALONE
def test_learner_leaving_during_nccl_push_frees_server(server, transfer):
    _, client = server
    transfer.connect(client)
    expect(client, transfer, weights())
    transfer.send(Packed([torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=DEVICE)]))
    transfer.disconnect()
    assert isinstance(client.pipe.recv(), str)
    transfer.connect(client)
    tensors = weights()
    expect(client, transfer, tensors)
    push(transfer, tensors)
    assert client.pipe.recv() == {name: sum_of(tensor) for name, tensor in tensors.items()}


@ON_GPU_ALONE
def test_gpu_learner_packs_tcp_buckets_into_pinned_memory():
    tensors = weights()
    packer = Packer(DEVICE, WeightTransfer.staging)
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
