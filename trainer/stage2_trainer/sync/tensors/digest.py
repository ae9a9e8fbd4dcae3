"""Digests of tensors and of layers, by which two machines compare bytes without sending them.

A tensor's bytes are read as 64-bit integers. Each is multiplied by an odd number that depends on its position; the sum
of each piece is mixed with the piece's number, and all are added modulo 2^64. Integer sums do not depend on order, so
threads and devices do not matter, and the speed is that of memory. One changed bit always changes the digest. It
guards against faults, not against an attacker who makes up tensors: the transfer itself is authenticated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

# splitmix64's 0x9E3779B97F4A7C15 and 0xBF58476D1CE4E5B9, as torch's signed numbers
GOLDEN, MULTIPLIER = -7046029254386353131, -4658895280553007687
LOWER_HALF = 2**32 - 1

WORD = 8  # bytes
PIECE = 2**15  # words that share a row of multipliers
PIECES_AT_ONCE = {"cpu": 4, "cuda": 2**10}

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
        self._found: dict[str, tuple[torch.dtype, torch.Size, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Digest one tensor; a later one of the same name replaces it."""
        self._found[name] = (tensor.dtype, tensor.shape, _bytes_digest(_words(tensor.detach())))

    def names(self) -> frozenset[str]:
        """Return the names of the tensors."""
        return frozenset(self._found)

    def by_tensor(self) -> dict[str, str]:
        """Return the digest of each tensor, its name, dtype and shape included."""
        numbers = [number.cpu() for *_, number in self._found.values()]
        found = {}
        for (name, (dtype, shape, _)), number in zip(self._found.items(), numbers, strict=True):
            found[name] = _short_hash(f"{name}|{str(dtype).removeprefix('torch.')}|{list(shape)}|{int(number)}")
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


def mixed(words: Tensor) -> Tensor:
    """Spread each integer over its 64 bits, as splitmix64 does; different integers stay different."""
    return _folded(_folded(words) * MULTIPLIER)


def _folded(words: Tensor) -> Tensor:
    return words ^ ((words >> 32) & LOWER_HALF)


def _short_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=WORD).hexdigest()


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as int64, the last one padded with zeros; a view where that is possible."""
    whole = tensor.contiguous().view(-1)
    if tensor.nbytes % WORD == 0 and whole.data_ptr() % WORD == 0 and tensor.nbytes:
        starts = whole.storage_offset() * whole.itemsize
        return whole.view(torch.int64) if starts % WORD == 0 else whole.clone().view(torch.int64)
    filled = whole.new_zeros(-(-tensor.nbytes // WORD) * WORD, dtype=torch.uint8)
    filled[: tensor.nbytes] = whole.view(torch.uint8)
    return filled.view(torch.int64)


def _bytes_digest(words: Tensor) -> Tensor:
    """Return the digest of the words of a tensor: an int64 scalar on its device."""
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


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> Tensor:
    """Return one odd number for each position in a piece; the same on every device."""
    return mixed(torch.arange(1, PIECE + 1) * GOLDEN).bitwise_or_(1).to(device)
