"""Attention over packed rows by PyTorch's own kernel: the learner needs no flash-attn package.

Registered with transformers as `packed`. A layer that gets the ends of sequences (`cu_seq_lens_q`, passed by
`PaddingFreeBatch.model_inputs`) attends within each of them and builds no mask: on a GPU in one call of
`torch.nn.attention.varlen`, elsewhere sequence by sequence, with the same result. A layer without them, as in
generation with a cache, uses the ordinary masked attention of `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils.import_utils import is_flash_attn_2_available

PACKED = "packed"
# transformers passes a vision tower's image boundaries only to implementations with `flash` in their name. It calls any
# other image by image, and each layer waits for the device to read their lengths.
PACKED_VISION = "packed_flash"

HALF_FORMATS = frozenset({torch.bfloat16, torch.float16})
FIRST_CAPABILITY = (8, 0)  # Ampere: PyTorch's flash attention has no kernels for older GPUs
MOST_HEAD_DIM = 256
HEAD_DIM_STEP = 8


@dataclass(frozen=True)
class Sequences:
    """The sequences of concatenated rows, and how each attends to itself.

    ends: int32 (sequences + 1,), from 0, on the queries' device. longest: tokens of the longest one. scale: factor of
    the scores before softmax; None is 1 / sqrt(head dim).
    """

    ends: Tensor
    longest: int
    causal: bool
    scale: float | None = None
    dropout: float = 0.0


class DeferredMask:
    """A mask that is built on demand: T x T values, which no packed row ever needs."""

    def __init__(self, make: Callable[[], Tensor | None]) -> None:
        self._make = make

    @cached_property
    def tensor(self) -> Tensor | None:
        """The mask of `sdpa`; None if it is plainly causal."""
        return self._make()


def attention_here(asked: str) -> str:
    """Return the implementation that runs on this machine for the configured `asked`.

    Without the flash-attn package `flash_attention_2` is PyTorch's own flash kernel, which was derived from it.
    """
    if asked == "auto" or (asked == "flash_attention_2" and not is_flash_attn_2_available()):
        return PACKED
    return asked


def attention_words(implementation: str, *, on_gpu: bool) -> str:
    """Return the name of what computes the learner's attention, for the log and the record.

    implementation: from `attention_here`. on_gpu: whether the model is on a GPU.
    """
    if implementation != PACKED:
        return implementation
    if not on_gpu:
        return "packed, sequence by sequence"
    heads = "in groups of heads" if groups_heads(_varlen_kernel()) else "with repeated keys and values"
    return f"packed, at 16 bits PyTorch's kernel {heads}"


def pack_vision_tower(model: Any) -> None:
    """Make the vision tower of a model that was loaded with `packed` attend to all images in one call."""
    if model.config._attn_implementation == PACKED:
        model.model.visual.config._attn_implementation = PACKED_VISION


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DeferredMask | Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (B, T, heads, D) for (B, heads, T, D), by transformers' signature of an attention implementation.

    options: those of transformers: `scaling`, `dropout`, `is_causal`, and with sequences `max_length_q`.
    """
    if cu_seq_lens_q is None:
        mask = attention_mask.tensor if isinstance(attention_mask, DeferredMask) else attention_mask
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
        return found
    causal, longest = options.get("is_causal"), options.get("max_length_q")
    sequences = Sequences(
        cu_seq_lens_q,
        longest=int(cu_seq_lens_q.diff().max()) if longest is None else longest,
        causal=bool(getattr(module, "is_causal", True)) if causal is None else causal,
        scale=options.get("scaling"),
        dropout=options.get("dropout", 0.0),
    )
    dtype = None if sequences.dropout else _kernel_dtype(query)
    q, k, v = (each.transpose(1, 2).flatten(0, 1).to(dtype or each.dtype) for each in (query, key, value))
    attended = one_by_one(q, k, v, sequences) if dtype is None else by_kernel(q, k, v, sequences)
    return attended.unflatten(0, (query.shape[0], query.shape[2])), None


def by_kernel(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Attend by one call of PyTorch's flash kernel, which needs half precision and a GPU.

    All are (T, heads, D). Keys and values may have fewer heads, in groups.
    """
    kernel, ends = _varlen_kernel(), sequences.ends.to(torch.int32)
    key, value, grouping = with_kernels_heads(kernel, query, key, value)
    attended = kernel(
        query,
        key,
        value,
        ends,
        ends,
        sequences.longest,
        sequences.longest,
        scale=sequences.scale,
        window_size=(-1, 0) if sequences.causal else (-1, -1),
        **grouping,
    )
    assert isinstance(attended, Tensor), "no auxiliary output was requested"
    return attended


def with_kernels_heads(
    kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, dict[str, bool]]:
    """Return keys and values with the heads that a kernel takes, and the option that it needs for them.

    Heads are the second dimension. A kernel without groups gets each head of keys and values once for each query head.
    """
    if query.shape[1] == key.shape[1]:
        return key, value, {}
    if groups_heads(kernel):
        return key, value, {"enable_gqa": True}
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1), {}


@cache
def groups_heads(kernel: Callable[..., Any]) -> bool:
    """Whether query heads can share those of keys and values in a kernel: PyTorch's can from 2.12 on."""
    return "enable_gqa" in signature(kernel).parameters


def _varlen_kernel() -> Callable[..., Any]:
    from torch.nn.attention import varlen  # a CPU never needs it

    return varlen.varlen_attn


def one_by_one(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Attend sequence by sequence: on a CPU, in float32, or on a GPU that the kernel does not support."""
    attended = []
    for start, end in pairwise(sequences.ends.tolist()):
        own_query, own_key, own_value = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
        found = scaled_dot_product_attention(
            own_query,
            own_key,
            own_value,
            dropout_p=sequences.dropout,
            is_causal=sequences.causal,
            scale=sequences.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        attended.append(found.squeeze(0).transpose(0, 1))
    return torch.cat(attended)


def kernel_dtype(
    dtype: torch.dtype, head_dim: int, *, capability: tuple[int, int], autocast: torch.dtype | None
) -> torch.dtype | None:
    """Return the dtype in which a GPU's kernel attends to such queries; None where it cannot.

    autocast: the dtype of mixed precision, to which float32 is cast; None without.
    """
    if capability < FIRST_CAPABILITY or head_dim % HEAD_DIM_STEP or head_dim > MOST_HEAD_DIM:
        return None
    wanted = dtype if dtype in HALF_FORMATS else autocast
    return wanted if wanted in HALF_FORMATS else None


def _kernel_dtype(query: Tensor) -> torch.dtype | None:
    if not query.is_cuda:
        return None
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    capability = torch.cuda.get_device_capability(query.device)
    return kernel_dtype(query.dtype, query.shape[-1], capability=capability, autocast=autocast)


for _name in (PACKED, PACKED_VISION):
    AttentionInterface.register(_name, packed_attention)
    AttentionMaskInterface.register(_name, lambda **arguments: DeferredMask(lambda: sdpa_mask(**arguments)))
