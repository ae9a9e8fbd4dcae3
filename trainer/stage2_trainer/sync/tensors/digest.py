"""Digests of tensors and of layers, by which two machines compare bytes without sending them.

A tensor's bytes are read as 64-bit integers. Each is multiplied by an odd number that depends on its position; the sum
of each piece is mixed with the piece's number, and all are added modulo 2^64. Integer sums do not depend on order, so
threads and devices do not matter, and the speed is that of memory. One changed bit always changes the digest. It
guards against faults, not against an attacker who makes up tensors: the transfer itself is authenticated.

On a CPU a loop compiled by numba reads each word once; models of small tensors, GPUs, and machines without numba use
torch's operations. The result is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage2_trainer.sync.tensors.exact import GOLDEN, LOWER_HALF, MULTIPLIER, mixed

WORD = 8  # bytes
PIECE = 2**15  # words that share a row of multipliers
PIECES_AT_ONCE = {"cpu": 4, "cuda": 2**10}
KERNEL_WORDS = 2**16  # models of smaller tensors are digested sooner than the loop is compiled (2 s)
PIECES_A_THREAD = 16  # of the compiled loop: fewer take less time than starting a thread

Words = NDArray[np.int64]
SumOfPieces = Callable[[Words, Words, int], int]
Compiled = TypeVar("Compiled", bound=Callable[..., Any])

# What vLLM keeps in one matrix: a push of a part of it would leave garbage in the rest, silently.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def fused_layer(name: str) -> str:
    """Return the layer that vLLM loads a tensor into.

    >>> fused_layer("model.layers.0.self_attn.k_proj.bias")
    'model.layers.0.self_attn.qkv_proj'
    """
    owner = name.rpartition(".")[0]
    head, _, last = owner.rpartition(".")
    return f"{head}.{FUSED.get(last, last)}"


class Digests:
    """The digests of a stream of tensors. They stay on the device until they are read."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[torch.dtype, torch.Size, Tensor | int]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Digest one tensor; a later one of the same name replaces it."""
        self._found[name] = (tensor.dtype, tensor.shape, _bytes_digest(tensor.detach()))

    def by_tensor(self) -> dict[str, str]:
        """Return the digest of each tensor, its name, dtype and shape included."""
        numbers = (number for *_, number in self._found.values())
        on_devices = [number.cpu() for number in numbers if isinstance(number, Tensor)]
        arrived = iter(torch.stack(on_devices).tolist() if on_devices else ())
        found = {}
        for name, (dtype, shape, number) in self._found.items():
            whole = next(arrived) if isinstance(number, Tensor) else number
            found[name] = _short_hash(f"{name}|{str(dtype).removeprefix('torch.')}|{list(shape)}|{whole}")
        return found

    def by_layer(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return one digest for all tensors of each layer as vLLM fuses them.

        names: the tensors that there must be; a layer that lacks one gets a digest that no layer has. None = those
        that were added.
        """
        found = self.by_tensor()
        layers: dict[str, list[str]] = {}
        for name in sorted(found if names is None else names):
            layers.setdefault(fused_layer(name), []).append(found.get(name, name))
        return {layer: _short_hash("".join(digests)) for layer, digests in layers.items()}


def differing(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the names whose digests differ, those that only one side has included."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def _short_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=WORD).hexdigest()


def _bytes_digest(tensor: Tensor) -> Tensor | int:
    """Return the digest of a tensor's bytes: an int64 scalar on its device, or the number itself where it is known.

    There are hundreds of tensors, and none may cost more than its bytes do: each operation of torch counts here.
    """
    words = _words(tensor)
    pays = words.numel() >= KERNEL_WORDS or _kernel.cache_info().currsize
    kernel = _kernel() if pays and words.device.type == "cpu" else None
    return _by_torch(words) if kernel is None else _by_kernel(words, kernel)


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as int64, the last one padded with zeros; a view where that is possible."""
    whole = tensor.contiguous().view(-1)
    if tensor.nbytes % WORD == 0 and whole.data_ptr() % WORD == 0 and tensor.nbytes:
        starts = whole.storage_offset() * whole.itemsize
        return whole.view(torch.int64) if starts % WORD == 0 else whole.clone().view(torch.int64)
    filled = whole.new_zeros(-(-tensor.nbytes // WORD) * WORD, dtype=torch.uint8)
    filled[: tensor.nbytes] = whole.view(torch.uint8)
    return filled.view(torch.int64)


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


def _by_kernel(words: Tensor, sum_of_pieces: SumOfPieces) -> int:
    numbers, multipliers = words.numpy(), _multipliers(words.device).numpy()
    threads = min(torch.get_num_threads(), -(-numbers.size // (PIECES_A_THREAD * PIECE)))
    if threads <= 1:
        return int(sum_of_pieces(numbers, multipliers, 0))
    pieces = -(-numbers.size // (threads * PIECE))

    def part(first: int) -> int:
        return sum_of_pieces(numbers[first * PIECE : (first + pieces) * PIECE], multipliers, first)

    with ThreadPoolExecutor(threads) as pool:
        return int(np.array(list(pool.map(part, range(0, threads * pieces, pieces))), dtype=np.int64).sum())


@lru_cache(maxsize=1)
def _kernel() -> SumOfPieces | None:
    """Return the compiled loop; None where numba is not there, or not for this numpy (`merge_math` logs that)."""
    try:
        from numba import njit
    except ImportError:
        return None
    golden, multiplier, lower_half = np.int64(GOLDEN), np.int64(MULTIPLIER), np.int64(LOWER_HALF)
    half = np.int64(32)
    compiled = cast(Callable[[Compiled], Compiled], njit(nogil=True))

    @compiled
    def folded(word: Any) -> Any:
        return word ^ ((word >> half) & lower_half)

    @compiled
    def sum_of_pieces(words: Words, multipliers: Words, first: int) -> Any:
        """Return the sum of the mixed sums of pieces, the first of which has this number; modulo 2^64."""
        total = np.int64(0)
        for start in range(0, len(words), len(multipliers)):
            piece = words[start : start + len(multipliers)]
            found = np.int64(0)
            for i in range(len(piece)):
                found += piece[i] * multipliers[i]
            found += np.int64(first + start // len(multipliers)) * golden
            total += folded(folded(found) * multiplier)
        return total

    return sum_of_pieces


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> Tensor:
    """Return one odd number for each position in a piece; the same on every device."""
    return mixed(torch.arange(1, PIECE + 1) * GOLDEN).bitwise_or_(1).to(device)
