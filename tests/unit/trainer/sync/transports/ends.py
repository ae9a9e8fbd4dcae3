"""Both ends of a transfer, over TCP or over sockets in NCCL's place, for tests of one process."""

import threading

import torch

from stage2_trainer.sync.tensors.announcement import TensorMeta, plan_buckets, take
from stage2_trainer.sync.transports.link import GroupInfo
from stage2_trainer.sync.transports.nccl import NcclTransfer
from stage2_trainer.sync.transports.receiver import Receiver
from stage2_trainer.sync.transports.transfer import Packed, WeightTransfer
from stage2_trainer.wire.errors import LinkError
from tests.support.socket_communicator import SocketCommunicator

CPU = torch.device("cpu")
LIMIT = 64


class Client:
    """A server with so many workers, each of which joins in a thread when it is called."""

    base_url = "http://127.0.0.1:8000"

    def __init__(self, receivers):
        self.receivers = receivers

    def world_size(self):
        return len(self.receivers)

    def post(self, path, phase, *, body):
        info = GroupInfo(**body["init_info"])
        joining = [
            in_thread(worker.join, info, info.rank_offset + number) for number, worker in enumerate(self.receivers)
        ]
        for thread in joining:
            thread.join()


def tcp_transfer(port, token, timeout_s=10.0):
    return WeightTransfer(port, token=token, bucket_bytes=LIMIT, timeout_s=timeout_s)


def tcp_receiver():
    return Receiver("tcp", CPU)


def nccl_transfer(port, token, communicator=SocketCommunicator, timeout_s=10.0, shared=None):
    options = {"token": token, "bucket_bytes": LIMIT, "timeout_s": timeout_s}
    return NcclTransfer(port, CPU, communicator=communicator, shared=shared, **options)


def nccl_receiver(communicator=SocketCommunicator):
    return Receiver("nccl", CPU, communicator)


def in_thread(step, *arguments):
    thread = threading.Thread(target=step, args=arguments)
    thread.start()
    return thread


def outcome_of(step, *arguments):
    """Run a step in a thread; returns the thread and a list that its LinkError lands in."""
    errors = []

    def run():
        try:
            step(*arguments)
        except LinkError as error:
            errors.append(error)

    return in_thread(run), errors


def metas_of(tensors):
    return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def send_all(transfer, tensors):
    """Send tensors, as buckets of the limit, in one piece each: what NCCL needs."""
    stream = iter(tensors.items())
    for bucket in plan_buckets(metas_of(tensors), LIMIT):
        transfer.send(Packed([torch.cat([part for _, part in take(bucket, stream)])]))


def received(transfer, receivers, tensors):
    """Send tensors to workers; returns what each has received."""
    found = [{} for _ in receivers]
    threads = [
        in_thread(worker.receive, metas_of(tensors), got.update, transfer.group)
        for worker, got in zip(receivers, found, strict=True)
    ]
    send_all(transfer, tensors)
    for thread in threads:
        thread.join()
    return found


def arrives(transfer, worker):
    """Check that the worker receives what the learner sends."""
    (got,) = received(transfer, [worker], {"a": torch.ones(3)})
    assert torch.equal(got["a"], torch.ones(3))
