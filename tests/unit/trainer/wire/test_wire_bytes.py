"""The bytes that a learner says it has sent are those that crossed: the kernel of the other end counts the same."""

import socket
import struct
import time
from contextlib import ExitStack

import pytest
import torch

from stage2_trainer.sync.transports.buckets import plan_buckets
from stage2_trainer.sync.transports.connection import Connection
from stage2_trainer.sync.transports.handshake import CHALLENGE_BYTES, PROOF_BYTES
from stage2_trainer.sync.transports.link import TAG_BYTES, Link
from stage2_trainer.sync.transports.receiver import Receiver
from stage2_trainer.sync.transports.tcp import TcpTransfer, open_tcp
from stage2_trainer.wire.errors import LinkError
from tests.unit.trainer.wire.test_transfer_group import LIMIT, Client, in_thread, metas_of, send_all

KEY = bytes(32)
BYTES_RECEIVED = struct.Struct("=128xQ")  # in the kernel's struct tcp_info, include/uapi/linux/tcp.h
FRAMING = CHALLENGE_BYTES + PROOF_BYTES  # of the learner's side of a handshake


@pytest.fixture
def ends():
    with socket.socket() as listening, ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        ours = socket.create_connection(listening.getsockname())
        theirs = stack.enter_context(listening.accept()[0])
        yield stack.enter_context(Connection(ours)), theirs


def arrived(end):
    return BYTES_RECEIVED.unpack_from(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))[0]


def test_a_link_counts_what_the_other_end_s_kernel_has_received(ends):
    connection, other = ends
    link = Link(connection, own_key=KEY, other_key=KEY)
    reading = in_thread(lambda: [None for _ in iter(lambda: other.recv(2**16), b"")])
    expected = 0
    for sizes in ([1], [3_000_000], [7] * 500, []):
        link.send([bytes(size) for size in sizes], 20.0)
        expected += sum(sizes) + TAG_BYTES
        assert link.sent == expected
    link.close()
    reading.join()
    assert arrived(other) == expected + 1, "the end of a connection counts as one"


def test_what_the_kernel_did_not_take_is_not_counted(ends):
    connection, other = ends
    with pytest.raises(LinkError, match="not in time"):
        connection.send(bytes(2**26), time.monotonic() + 0.2)
    connection.abort()
    crossed = 0
    while part := other.recv(2**20):
        crossed += len(part)
    assert 0 < connection.sent == crossed < 2**26


@pytest.mark.parametrize("workers", [1, 3])
def test_a_transfer_counts_the_tensors_of_every_worker_and_a_bounded_frame(port, token, workers):
    tensors = {f"t{i}": torch.randn(i + 1, 3) for i in range(9)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    buckets = len(list(plan_buckets(metas_of(tensors), LIMIT)))
    transfer = TcpTransfer(port, token=token, bucket_bytes=LIMIT, timeout_s=10.0)
    receivers = [Receiver("tcp", open_tcp) for _ in range(workers)]
    for times in (1, 2):
        transfer.connect(Client(receivers))
        threads = [in_thread(one.receive, metas_of(tensors), list, transfer.group) for one in receivers]
        send_all(transfer, tensors)
        for thread in threads:
            thread.join()
        transfer.disconnect()
        assert transfer.sent == times * workers * (nbytes + buckets * TAG_BYTES + FRAMING)
    transfer.close()
