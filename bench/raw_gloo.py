"""The limit that a sync is measured against: a gloo broadcast of the same bytes in the same pieces, and nothing else.

Buffers are as those of a sync: two on the learner, filled once, and two on a server, used in turn. Sealed, each bucket
is encrypted and authenticated by AES-GCM, TLS's cipher: for each server by a key of its own, into two more
buffers on the learner, and on the server from two more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from torch._C._distributed_c10d import TCPStore

from stage2_trainer.sync.swift.swift_groups import gloo_process_group

Keep = Callable[[int, torch.Tensor], None]
LOOPBACK = "127.0.0.1"
PATIENCE_S = 60.0
KEY_BYTES, TAG_BYTES = 32, 16
KEYS = [bytes([rank]) * KEY_BYTES for rank in range(64)]  # of a benchmark: nothing that is secret is sent


def group(port: int, rank: int) -> Any:
    """Return the group of the learner (rank 0, which holds the store) and one server; blocks until both are there."""
    patience = timedelta(seconds=PATIENCE_S)
    store = TCPStore(LOOPBACK, port, is_master=rank == 0, timeout=patience, wait_for_workers=False)
    return gloo_process_group(store, rank, 2, address=LOOPBACK, timeout_s=PATIENCE_S)


def broadcast(groups: Sequence[Any], sizes: Sequence[int], keep: Keep | None = None) -> None:
    """Send, or receive, buffers of these sizes in all groups, two at a time.

    keep: what is done with each that is there.
    """
    buffers = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(2)]
    flying: list[Any] = []
    for number, size in enumerate(sizes):
        started = [group.broadcast(buffers[number % 2][:size], root=0) for group in groups]
        _land(flying, number - 1, buffers, sizes, keep)
        flying = started
    _land(flying, len(sizes) - 1, buffers, sizes, keep)


def broadcast_sealed(groups: Sequence[Any], sizes: Sequence[int]) -> None:
    """Send buffers of these sizes in all groups, each sealed before it goes, while the one before is on its way."""
    plain = torch.zeros(max(sizes), dtype=torch.uint8)
    sealed = [[torch.zeros(max(sizes) + TAG_BYTES, dtype=torch.uint8) for _ in range(2)] for _ in groups]
    flying: list[Any] = []
    for number, size in enumerate(sizes):
        started = []
        for rank, group in enumerate(groups):
            buffer = sealed[rank][number % 2][: size + TAG_BYTES]
            seal(plain[:size], buffer, number, KEYS[rank])
            started.append(group.broadcast(buffer, root=0))
        for work in flying:
            work.wait()
        flying = started
    for work in flying:
        work.wait()


def broadcast_made(groups: Sequence[Any], buffers: Iterable[torch.Tensor]) -> None:
    """Send buffers in all groups, each made while the one before is on its way."""
    flying: list[Any] = []
    for buffer in buffers:
        started = [group.broadcast(buffer, root=0) for group in groups]
        for work in flying:
            work.wait()
        flying = started
    for work in flying:
        work.wait()


def receive_sealed(group: Any, rank: int, sizes: Sequence[int], keep: Keep | None) -> None:
    """Receive what `broadcast_sealed` sends to the server of this rank, and open each buffer."""
    opened = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(2)]

    def open_and_keep(number: int, buffer: torch.Tensor) -> None:
        place = opened[number % 2][: sizes[number]]
        unseal(buffer, place, number, KEYS[rank])
        if keep is not None:
            keep(number, place)

    broadcast([group], [size + TAG_BYTES for size in sizes], open_and_keep)


def seal(plain: torch.Tensor, sealed: torch.Tensor, number: int, key: bytes) -> None:
    """Encrypt a buffer into one that has room for the tag behind it."""
    cipher = Cipher(AES(key), GCM(number.to_bytes(12, "big"))).encryptor()
    written = cipher.update_into(plain.numpy().data, sealed.numpy().data)
    cipher.finalize()
    sealed.numpy()[written:] = bytearray(cipher.tag)


def unseal(sealed: torch.Tensor, plain: torch.Tensor, number: int, key: bytes) -> None:
    """Decrypt what `seal` has made. Raises InvalidTag where it is something else."""
    cipher = Cipher(AES(key), GCM(number.to_bytes(12, "big"))).decryptor()
    cipher.update_into(sealed.numpy().data[: len(plain)], plain.numpy().data)
    cipher.finalize_with_tag(sealed.numpy()[len(plain) :].tobytes())


def _land(
    flying: Sequence[Any], number: int, buffers: Sequence[torch.Tensor], sizes: Sequence[int], keep: Keep | None
) -> None:
    for work in flying:
        work.wait()
    if keep is not None and number >= 0:
        keep(number, buffers[number % 2][: sizes[number]])
