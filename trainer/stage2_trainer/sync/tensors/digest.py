"""Digests of tensors, by which two machines tell whether they hold the same bytes without sending them.

A tensor's bytes are read as 64-bit whole numbers. Each is multiplied by an odd number that depends on its place, the
sums of pieces are mixed with the piece's number, and all is added up, modulo 2^64. Whole numbers add up the same in any
order, so threads and devices do not matter, and it is done at the speed of memory. One changed bit always changes the
digest. It guards against faults, not against somebody who makes up tensors: the transfer itself is guarded.

On a CPU a compiled loop reads each word once (`digest_kernel`); models of small tensors, and all where numba is not
installed, take torch's operations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage2_trainer.sync.tensors.fused import fused_layer
from stage2_trainer.sync.tensors.splitmix import GOLDEN, mixed

WORD = 8  # bytes
PIECE = 2**15  # words that share a row of multipliers
PIECES_AT_ONCE = {"cpu": 4, "cuda": 2**10}
KERNEL_WORDS = 2**16  # models of smaller tensors are digested sooner than a loop is compiled (2 s)
PIECES_A_THREAD = 16  # of the compiled loop: in less time than fewer take no thread is started


class Digests:
    """The digests of a stream of tensors. They stay on the device until they are asked for."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[torch.dtype, torch.Size, Tensor | int]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; of one name the last counts."""
        self._found[name] = (tensor.dtype, tensor.shape, _bytes_digest(tensor.detach()))

    def of_tensors(self) -> dict[str, str]:
        """Return the digest of each tensor, its name, dtype and shape included."""
        numbers = (number for *_, number in self._found.values())
        on_devices = [number.cpu() for number in numbers if isinstance(number, Tensor)]
        arrived = iter(torch.stack(on_devices).tolist() if on_devices else ())
        found = {}
        for name, (dtype, shape, number) in self._found.items():
            whole = next(arrived) if isinstance(number, Tensor) else number
            label = f"{name}|{str(dtype).removeprefix('torch.')}|{list(shape)}|{whole}"
            found[name] = hashlib.blake2b(label.encode(), digest_size=WORD).hexdigest()
        return found

    def of_layers(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return one digest for all tensors of each layer as vLLM fuses them.

        names: the tensors that there must be; a layer that lacks one has the digest of no layer. None = those taken.
        """
        found = self.of_tensors()
        layers: dict[str, list[str]] = {}
        for name in sorted(found if names is None else names):
            layers.setdefault(fused_layer(name), []).append(found.get(name, name))
        return {
            layer: hashlib.blake2b("".join(f).encode(), digest_size=WORD).hexdigest() for layer, f in layers.items()
        }


def digests_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the digest of each tensor."""
    digests = Digests()
    for name, tensor in tensors:
        digests.add(name, tensor)
    return digests.of_tensors()


def differing(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the names whose digests are not equal, those that only one side has included."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def _bytes_digest(tensor: Tensor) -> Tensor | int:
    """Return the digest of a tensor's bytes: as an int64 scalar on its device, or the number itself where it is known.

    There are hundreds of tensors, and none may cost more than its bytes do: each operation of torch counts here.
    """
    words = _words(tensor)
    kernel = _kernel_for(words)
    return _by_torch(words) if kernel is None else _by_kernel(words, kernel)


def _by_kernel(words: Tensor, kernel: ModuleType) -> int:
    numbers, multipliers = words.numpy(), _multipliers_of_cpu()
    threads = min(torch.get_num_threads(), -(-numbers.size // (PIECES_A_THREAD * PIECE)))
    if threads <= 1:
        return int(kernel.sum_of_pieces(numbers, multipliers, 0))
    pieces = -(-numbers.size // (threads * PIECE))

    def part(first: int) -> int:
        found: int = kernel.sum_of_pieces(numbers[first * PIECE : (first + pieces) * PIECE], multipliers, first)
        return found

    with ThreadPoolExecutor(threads) as pool:
        return int(np.array(list(pool.map(part, range(0, threads * pieces, pieces))), dtype=np.int64).sum())


def _kernel_for(words: Tensor) -> ModuleType | None:
    """Return the compiled loop where it can be had and pays, or is there anyway."""
    pays = words.numel() >= KERNEL_WORDS or _kernel.cache_info().currsize
    return _kernel() if pays and words.device.type == "cpu" else None


@lru_cache(maxsize=1)
def _kernel() -> ModuleType | None:
    try:
        from stage2_trainer.sync.tensors import digest_kernel
    except ImportError:  # numba is not there, or not for this numpy; `merge_math` says so
        return None
    return digest_kernel


def _by_torch(words: Tensor) -> Tensor:
    total = words.new_zeros(())
    step = PIECE * PIECES_AT_ONCE[words.device.type]
    multipliers = _multipliers(words.device)
    for start in range(0, len(words), step):
        slab = words[start : start + step]
        whole = len(slab) // PIECE
        sums = (slab[: whole * PIECE].view(whole, PIECE) * multipliers).sum(1)
        if rest := len(slab) - whole * PIECE:
            sums = torch.cat([sums, (slab[-rest:] * multipliers[:rest]).sum().view(1)])
        places = torch.arange(start // PIECE, start // PIECE + len(sums), device=words.device)
        total += mixed(sums + places * GOLDEN).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as int64, the last one filled up with zeros; a view where that is possible."""
    whole = tensor.contiguous().view(-1)
    if tensor.nbytes % WORD == 0 and whole.data_ptr() % WORD == 0 and tensor.nbytes:
        starts = whole.storage_offset() * whole.itemsize
        return whole.view(torch.int64) if starts % WORD == 0 else whole.clone().view(torch.int64)
    filled = whole.new_zeros(-(-tensor.nbytes // WORD) * WORD, dtype=torch.uint8)
    filled[: tensor.nbytes] = whole.view(torch.uint8)
    return filled.view(torch.int64)


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> Tensor:
    """Return one odd number for each place of a piece; the same on every device."""
    return mixed(torch.arange(1, PIECE + 1) * GOLDEN).bitwise_or_(1).to(device)


@lru_cache(maxsize=1)
def _multipliers_of_cpu() -> NDArray[np.int64]:
    multipliers: NDArray[np.int64] = _multipliers(torch.device("cpu")).numpy()
    return multipliers
