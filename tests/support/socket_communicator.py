"""NCCL's part in a transfer, played by sockets of this machine: for tests where no GPU is.

It blocks as NCCL does: on members that have not joined, and on those that read nothing. docs/testing.md lists what it
cannot show.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from stage2_trainer.sync.fleet import server
from stage2_trainer.sync.transports.nccl import NcclTransfer
from stage2_trainer.sync.transports.nccl_group import UNIQUE_ID_BYTES, OneGroup

CPU = torch.device("cpu")
PORT = struct.Struct("!H")


class SocketCommunicator:
    """A communicator over plain sockets: its calls move bytes, and wait forever for a side that does not come.

    No call of NCCL ends for a signal, so none that waits may be made in the main thread, where SIGTERM is heard.
    """

    def __init__(self, device: torch.device) -> None:
        self._listening = socket.socket()
        self._members: list[socket.socket] = []
        self._rank = 0

    def new_unique_id(self) -> bytes:
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen()
        return PORT.pack(self._listening.getsockname()[1]).ljust(UNIQUE_ID_BYTES, b"\0")

    def open(self, unique_id: bytes, rank: int, world_size: int) -> None:
        _off_the_main_thread()
        self._rank = rank
        if rank == 0:
            for _ in range(world_size - 1):
                self._members.append(self._listening.accept()[0])
        else:
            self._members = [socket.create_connection(("127.0.0.1", PORT.unpack_from(unique_id)[0]))]

    def broadcast(self, buffer: torch.Tensor, ready: Any) -> None:
        _off_the_main_thread()
        try:
            self._broadcast(buffer)
        except OSError as error:
            raise RuntimeError(f"NCCL error: {error}") from error

    def abort(self) -> None:
        _off_the_main_thread()
        for end in (*self._members, self._listening):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # what waits in it returns
            end.close()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        if self._rank == 0:
            for member in self._members:
                member.sendall(buffer.numpy().data)
        elif self._members[0].recv_into(buffer.numpy().data, len(buffer), socket.MSG_WAITALL) < len(buffer):
            raise RuntimeError("remote process exited or there was a network error")


def _off_the_main_thread() -> None:
    if threading.current_thread() is threading.main_thread():
        raise AssertionError("a call of NCCL in the main thread, which no signal would end")


def _transfer(
    _device: torch.device,
    group_port: int,
    *,
    requested: str,
    shared: tuple[OneGroup, int] | None = None,
    **options: Any,
) -> NcclTransfer:
    return NcclTransfer(group_port, CPU, shared=shared, communicator=SocketCommunicator, **options)


def _one_group(_device: torch.device, servers: int, *, requested: str, timeout_s: float) -> OneGroup:
    return OneGroup(servers, communicator=partial(SocketCommunicator, CPU), timeout_s=timeout_s)


@contextlib.contextmanager
def sending_over(transport: str) -> Iterator[None]:
    """Let the fleets that are made in the block send over this transport; `nccl` without a GPU, which it would need."""
    chosen = server.transfer_for, server.one_group_for
    if transport == "nccl":
        server.transfer_for, server.one_group_for = _transfer, _one_group
    try:
        yield
    finally:
        server.transfer_for, server.one_group_for = chosen


if __name__ == "__main__":  # the command `stage2`, whose learner sends over it
    from stage2_cli.main import main

    with sending_over("nccl"):
        main()
