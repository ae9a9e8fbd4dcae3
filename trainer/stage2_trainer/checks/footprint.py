"""What a run needs, from the shapes of its model. Nothing is loaded.

Weights, adapters, gradients, optimizer and cache follow from shapes. Activations are counted in a pass over tensors
without values (`activations.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from stage2_api.runconfig import RunConfig
from stage2_trainer.checks.activations import MASK_BYTES, pass_bytes
from stage2_trainer.checks.resources import Footprint, Part
from stage2_trainer.learner.loss import CHUNK_ELEMENTS
from stage2_trainer.model.policy import adapt, adapter_options, coord_rows, freeze, frozen_parts, weights_dtype
from stage2_trainer.sync.fleet.delivery import SLOTS
from stage2_trainer.sync.tensors.announcement import DEFAULT_BUCKET_BYTES

OPTIMIZER_BYTES: Mapping[str, int] = {
    "sgd": 0, "adafactor": 1, "adagrad": 4, "rmsprop": 4, "adamw_8bit": 2, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2,
    "lion_8bit": 1, "paged_lion_8bit": 1, "lion_32bit": 4, "paged_lion_32bit": 4, "ademamix": 12, "ademamix_8bit": 3,
}  # fmt: skip
"""Bytes of optimizer state for each trained parameter; all other optimizers keep two moments in float32."""


def footprint(config: RunConfig, model: str, *, row_tokens: int) -> Footprint:
    """Return what a run of the model in this folder needs, with rows of `row_tokens` tokens.

    Raises:
        ConfigError: nothing of the model would train.
        OSError: there is no such folder, or it has no configuration of a model.
    """
    trusted = config.model.allow_remote_code
    shape = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=trusted)
    with torch.device("meta"):
        dtype = weights_dtype(config) or getattr(shape, "dtype", None) or torch.float32
        policy: Any = AutoModelForImageTextToText.from_config(shape, trust_remote_code=trusted, dtype=dtype)
    weights = sum(one.numel() for one in policy.parameters()) * dtype.itemsize
    if config.tuner.train_type == "full":
        freeze(policy, frozen_parts(config))
    else:
        rows, regex = coord_rows(config), config.tuner.target_regex
        with torch.device("meta"):
            policy = adapt(policy, frozen_parts(config), adapter_options(config), regex=regex, token_rows=rows)
    trained = sum(one.numel() for one in policy.parameters() if one.requires_grad)
    adapters = sum(one.numel() for name, one in policy.named_parameters() if "lora_" in name and one.requires_grad)
    text = shape.text_config
    weighed = (Part("weights", weights), Part("adapters", adapters * 4))
    optimizer = Part("optimizer", trained * OPTIMIZER_BYTES.get(config.training.optim, 8))
    pushes = config.makes_rollouts and config.rollout_matching.uses_servers
    buckets = Part("buckets of a push", SLOTS * DEFAULT_BUCKET_BYTES if pushes else 0)
    matching = config.rollout_matching
    engine = weights // matching.vllm.resolved_tensor_parallel_size(world_size=1)
    keeps_weights = config.makes_rollouts and matching.colocates and matching.vllm.sleep_level == 1
    stays = optimizer.nbytes * (not moves(config, "offload_optimizer"))
    return Footprint(
        learner=(
            *weighed,
            Part("gradients", trained * 4),
            optimizer,
            Part("activations", activations(config, policy, row_tokens)),
            Part("logits of the loss", 4 * 4 * CHUNK_ELEMENTS),
            buckets,
        ),
        offloaded=(*offloaded(config, policy, dtype), Part("vLLM's weights in its sleep", engine * keeps_weights)),
        beside_push=weights + engine + adapters * 4 + stays,
        beside_answers=(weights + adapters * 4) * (not moves(config, "offload_model")) + stays,
        server=(Part("weights", weights), buckets),
        cache_token=2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * dtype.itemsize,
        adapted=sum(one.base_layer.weight.numel() for one in policy.modules() if hasattr(one, "lora_A"))
        * dtype.itemsize,
        checkpoint=(adapters * 4 if adapters else weights)
        + (0 if config.training.save_only_model else optimizer.nbytes),
        trained=trained,
    )


def offloaded(config: RunConfig, policy: nn.Module, dtype: torch.dtype) -> tuple[Part, ...]:
    """Return the page-locked host memory of a colocated run, for what is offloaded during generation."""
    weights = {one: 4 if one.requires_grad else dtype.itemsize for one in policy.parameters()}
    state = OPTIMIZER_BYTES.get(config.training.optim, 8)
    moments = {one: state for one in policy.parameters() if one.requires_grad}
    return (
        *((Part("weights", _page_locked(weights)),) if moves(config, "offload_model") else ()),
        *((Part("optimizer", _page_locked(moments)),) if moves(config, "offload_optimizer") else ()),
    )


def moves(config: RunConfig, part: Literal["offload_model", "offload_optimizer"]) -> bool:
    """Whether this part of the training state leaves the GPU while a colocated engine generates."""
    matching = config.rollout_matching
    return matching.offload.enabled and matching.colocates and bool(getattr(matching.offload, part))


def _page_locked(widths: Mapping[nn.Parameter, int]) -> int:
    """Return the page-locked bytes of parameters of these widths: PyTorch rounds up to powers of two."""
    sizes = (one.numel() * width for one, width in widths.items())
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def activations(config: RunConfig, policy: Any, row_tokens: int) -> int:
    """Return the bytes of a pass over the rows of a micro-step, which a policy on the meta device makes (its last)."""
    training, rows = config.training, 1 if config.training.packing else config.training.per_device_train_batch_size
    if not row_tokens:
        return 0
    autocast = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    found = pass_bytes(
        policy, rows=rows, row_tokens=row_tokens, checkpointing=training.gradient_checkpointing, autocast=autocast
    )
    masked = config.model.attn_impl in ("sdpa", "eager") or config.rlhf is not None
    return found + (MASK_BYTES * rows * row_tokens**2 if masked else 0)
