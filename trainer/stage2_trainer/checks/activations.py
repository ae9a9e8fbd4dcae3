"""The memory of a forward and a backward pass, counted by running them on tensors without values (FakeTensor).

Formulas would miss what libraries do: PEFT casts the inputs of adapters to float32, DoRA keeps its weights' norms,
dropout keeps a mask. Attention is counted as a flash kernel's: inputs, output and one number for each query.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from stage2_trainer.model.attention import with_kernels_heads
from stage2_trainer.model.policy import rope_model

COUNTED = "counted"
COUNTED_VISION = "counted_flash"  # of another name, the vision tower would be called image by image
IMAGE_SHARE = 0.75  # of a row's tokens, at most: the rest are instructions and answers
MASK_BYTES = 3  # of each pair of tokens in a mask of `sdpa`: as it is built, and as the kernel reads it


class Flash(torch.autograd.Function):
    """The tensors that a flash kernel keeps and makes, without its work."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attended values (B, T, heads, D) of (B, heads, T, D)."""
        attended = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        ctx.save_for_backward(query, key, value, attended, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return attended

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        """Return gradients of the inputs."""
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors[:3])


def _counted_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    key, value, _grouping = with_kernels_heads(varlen_attn, query, key, value)
    return Flash.apply(query, key, value), None  # type: ignore[no-untyped-call]


for _name in (COUNTED, COUNTED_VISION):
    AttentionInterface.register(_name, _counted_attention)
    AttentionMaskInterface.register(_name, lambda **_: None)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def ignore(self, *tensors: Tensor) -> None:
        """Leave out tensors that were there before."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_iter(found):
            if isinstance(one, Tensor):
                self._add(one.untyped_storage())
        return found

    def _add(self, storage: Any) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage)
        weakref.finalize(storage, self._free, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, size: int) -> None:
        self.now -= size


def pass_bytes(policy: Any, *, rows: int, row_tokens: int, checkpointing: bool, autocast: torch.dtype | None) -> int:
    """Return the most bytes that a pass over `rows` rows holds at once, its pixels included, weights and gradients not.

    policy: on the meta device; it is of no use afterwards. autocast: the format of mixed precision. The loss, which is
    computed in chunks, is not counted.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device("cpu"):
        _take_place(policy.train())
        model = rope_model(policy)
        model.language_model.config._attn_implementation = COUNTED
        model.visual.config._attn_implementation = COUNTED_VISION
        if checkpointing:
            policy.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        live = LiveBytes()
        there = [*policy.parameters(), *policy.buffers()]
        live.ignore(*there, *(one.grad for one in there if one.grad is not None))
        with live:
            pixels = _pixels(model.visual, int(IMAGE_SHARE * rows * row_tokens))
            with torch.autocast("cpu", autocast) if autocast else nullcontext():
                hidden = _hidden(model, rows, row_tokens, pixels)
            if hidden.requires_grad:
                hidden.backward(torch.empty_like(hidden))
        return live.peak


def _take_place(policy: nn.Module) -> None:
    """Move a policy from the meta device to the CPU, and give what trains its gradients; no memory is taken."""
    moved: dict[Tensor | None, Any] = {None: None}
    for module in policy.modules():
        for name, one in module._parameters.items():
            if one not in moved:
                assert one is not None, "none is there"
                moved[one] = nn.Parameter(torch.empty(one.shape, dtype=one.dtype), requires_grad=one.requires_grad)
                moved[one].grad = torch.empty_like(moved[one]) if one.requires_grad else None
            module._parameters[name] = moved[one]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)


def _pixels(visual: Any, image_tokens: int) -> Tensor:
    """Return the patches (P, width) of images of so many tokens, as the learner's batch holds them during the pass."""
    shape = visual.config
    width = shape.in_channels * shape.temporal_patch_size * shape.patch_size**2
    return torch.zeros(image_tokens * shape.spatial_merge_size**2, width)


def _hidden(model: Any, rows: int, row_tokens: int, pixels: Tensor) -> Tensor:
    """Return the last hidden states (rows, T, H) of rows whose first tokens are images."""
    images = _encoded_images(model.visual, pixels) if len(pixels) else None
    image_tokens = 0 if images is None else len(images)
    text = model.language_model.embed_tokens(torch.zeros(rows * row_tokens - image_tokens, dtype=torch.long))
    embedded = text if images is None else torch.cat([images.to(text.dtype), text])
    positions = torch.zeros(3, rows, row_tokens, dtype=torch.long)
    embedded = embedded.view(rows, row_tokens, -1)
    found: Tensor = model.language_model(
        inputs_embeds=embedded, position_ids=positions, use_cache=False
    ).last_hidden_state
    return found


def _encoded_images(visual: Any, pixels: Tensor) -> Tensor:
    """Return the embeddings of images of these patches; what goes to lower layers of the text is part of them."""
    shape, patches = visual.config, len(pixels)
    hidden = visual.patch_embed(pixels)
    rotation = torch.zeros(patches, shape.hidden_size // shape.num_heads)
    ends, added = torch.zeros(2, dtype=torch.int32), []
    for number, block in enumerate(visual.blocks):
        hidden = block(hidden, cu_seqlens=ends, max_seqlen=patches, position_embeddings=(rotation, rotation))
        if number in visual.deepstack_visual_indexes:
            added.append(visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(number)](hidden))
    merged: Tensor = visual.merger(hidden)
    return torch.stack([merged, *added]).sum(0)
