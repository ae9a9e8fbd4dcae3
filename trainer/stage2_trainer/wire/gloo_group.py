"""A gloo group of the learner (rank 0, store master) and one server's workers, outside torch's default group.

Both ends use this module: the learner to open the group, our vLLM engine and the stub to join it. It imports torch
only.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work

from stage2_trainer.wire.torch_compat import drop_gloo_group, gloo_process_group

LEARNER_RANK = 0


@dataclass
class GroupInfo:
    """The group to join, and the place in it: the `init_info` of POST /init_weight_transfer_engine.

    rank_offset: rank of the server's first worker.
    packed_buffer_size_bytes: bucket limit (see `buckets`).
    name: unique for each group, so that a late joiner of an earlier group cannot enter this one.
    timeout_s: seconds that any wait in the group may take on the server's side.
    """

    master_address: str
    master_port: int
    world_size: int
    packed_buffer_size_bytes: int
    name: str
    timeout_s: float
    rank_offset: int = 1

    def to_wire(self) -> dict[str, object]:
        """Return the JSON object that the server is sent."""
        return asdict(self)


def address_towards(host: str, port: int) -> str:
    """Return the local address from which packets to `host` leave: the one that this host can reach back."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def open_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """Open the store that the server's workers dial, bound to `address` alone.

    Raises:
        OSError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns the socket from here on
    )


def dial_store(info: GroupInfo) -> TCPStore:
    """Dial the learner's store from a server."""
    timeout = timedelta(seconds=info.timeout_s)
    return TCPStore(info.master_address, info.master_port, is_master=False, timeout=timeout, wait_for_workers=False)


def announce(store: Store, info: GroupInfo, rank: int) -> None:
    """Tell the learner that this rank is about to enter the group."""
    PrefixStore(info.name, store).set(f"entering/{rank}", "")


def wait_for_workers(store: Store, info: GroupInfo, timeout_s: float, check: Callable[[], None]) -> None:
    """Wait on the learner until every worker has dialled in; `check` raises if that has become pointless.

    Entering the group before its peers are there would block for the whole timeout even when they never come.

    Raises:
        TimeoutError: some worker did not dial in within `timeout_s`.
    """
    keys = [f"entering/{rank}" for rank in range(info.rank_offset, info.world_size)]
    scoped = PrefixStore(info.name, store)
    deadline = time.monotonic() + timeout_s
    while not scoped.check(keys):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"not all of its {len(keys)} workers dialled {info.master_address}:{info.master_port}"
                f" within {timeout_s:g} s"
            )
        time.sleep(0.005)


class GlooGroup:
    """One process group, and the broadcasts from the learner that it exists for."""

    def __init__(self, store: Store, info: GroupInfo, rank: int) -> None:
        """Enter the group; returns when every rank has. Blocks at most `timeout_s`."""
        local = info.master_address if rank == LEARNER_RANK else address_towards(info.master_address, info.master_port)
        scoped = PrefixStore(info.name, store)
        self._held = [
            gloo_process_group(scoped, rank, info.world_size, address=local, timeout_s=info.timeout_s),
        ]

    def broadcast(self, buffer: torch.Tensor) -> Work:
        """Start the broadcast of `buffer` (uint8, shape (bytes,)) from the learner: sent there, filled elsewhere."""
        (group,) = self._held
        work: Work = group.broadcast(buffer, root=LEARNER_RANK)  # type: ignore[attr-defined]
        return work

    def close(self) -> None:
        """Leave the group; the other side's broadcasts fail."""
        drop_gloo_group(self._held)
