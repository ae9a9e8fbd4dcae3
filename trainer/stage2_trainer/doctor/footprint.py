"""The memory that a run will take on its GPUs and its disk, from the model's shapes alone: nothing is loaded.

Weights, adapters, gradients, optimizer and cache follow from shapes. Activations are estimated for a Qwen3 layer with
an attention kernel that keeps no scores (the counting of Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models"), and are good to about a third.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from stage2_api.runconfig import RunConfig
from stage2_trainer.learner.loss import CHUNK_ELEMENTS
from stage2_trainer.process.policy import adapt, adapter_options, coord_rows, freeze, frozen_parts, weights_dtype
from stage2_trainer.process.supported import in_process
from stage2_trainer.sync.fleet.delivery import SLOTS
from stage2_trainer.sync.transports.buckets import DEFAULT_BUCKET_BYTES

GIB = 2**30
CONTEXT_BYTES = GIB  # of a CUDA process, with its libraries
OPTIMIZER_BYTES: Mapping[str, int] = {
    "sgd": 0, "adafactor": 1, "adagrad": 4, "rmsprop": 4, "adamw_8bit": 2, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2,
    "lion_8bit": 1, "paged_lion_8bit": 1, "lion_32bit": 4, "paged_lion_32bit": 4, "ademamix": 12, "ademamix_8bit": 3,
}  # fmt: skip
"""Bytes that an optimizer keeps of each trained parameter; all others keep two moments in float32."""


@dataclass(frozen=True)
class Part:
    """A part of what is needed, in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Footprint:
    """The needs of a run, in bytes.

    learner: of a learner GPU. offloaded: of the host, for what leaves that GPU while answers are made. server: of one
    server's GPUs, but for its cache. cache_token: of a token in a server's cache. checkpoint: of one on disk. trained:
    parameters that train.
    """

    learner: tuple[Part, ...]
    offloaded: tuple[Part, ...]
    server: tuple[Part, ...]
    cache_token: int
    checkpoint: int
    trained: int


def total(parts: Iterable[Part]) -> int:
    """Return what parts come to."""
    return sum(part.nbytes for part in parts)


def footprint(config: RunConfig, model: str, *, row_tokens: int) -> Footprint:
    """Return what a run of the model in this folder needs; its rows have `row_tokens` tokens.

    Raises:
        ConfigError: nothing of the model would train.
        OSError: there is no such folder, or it has no configuration of a model.
    """
    trusted = config.model.allow_remote_code
    shape = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=trusted)
    with torch.device("meta"):
        policy: Any = AutoModelForImageTextToText.from_config(shape, trust_remote_code=trusted)
    dtype = weights_dtype(config) or getattr(shape, "dtype", None) or torch.float32
    weights = sum(one.numel() for one in policy.parameters()) * dtype.itemsize
    policy = _with_what_trains(config, policy)
    trained = sum(one.numel() for one in policy.parameters() if one.requires_grad)
    adapters = sum(one.numel() for name, one in policy.named_parameters() if "lora_" in name and one.requires_grad)
    text = shape.text_config
    weighed = (Part("weights", weights), Part("adapters", adapters * 4))
    optimizer = Part("optimizer", trained * OPTIMIZER_BYTES.get(config.training.optim, 8))
    buckets = Part("buckets of a push", SLOTS * DEFAULT_BUCKET_BYTES if pushes(config) else 0)
    return Footprint(
        learner=(
            *weighed,
            Part("gradients", trained * 4),
            optimizer,
            Part("activations", row_tokens * activations_per_token(text, config.training.gradient_checkpointing)),
            Part("logits of the loss", 4 * 4 * CHUNK_ELEMENTS),
            buckets,
            Part("CUDA", CONTEXT_BYTES),
        ),
        offloaded=offloaded(config, policy, dtype),
        server=(Part("weights", weights), buckets),
        cache_token=2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * dtype.itemsize,
        checkpoint=(adapters * 4 if adapters else weights) + optimizer.nbytes,
        trained=trained,
    )


def pushes(config: RunConfig) -> bool:
    """Whether a run sends weights to servers: with one at least, and not for an engine in its own process."""
    return config.makes_rollouts and not in_process(config)


def offloaded(config: RunConfig, policy: nn.Module, dtype: torch.dtype) -> tuple[Part, ...]:
    """Return what a colocated run moves to the host's memory while answers are made, page-locked."""
    chosen = config.rollout_matching.offload
    if not chosen.enabled or not in_process(config) or config.rollout_matching.rollout_backend == "hf":
        return ()
    weights = {one: 4 if one.requires_grad else dtype.itemsize for one in policy.parameters()}
    state = OPTIMIZER_BYTES.get(config.training.optim, 8)
    moments = {one: state for one in policy.parameters() if one.requires_grad}
    return (
        *((Part("weights", _page_locked(weights)),) if chosen.offload_model else ()),
        *((Part("optimizer", _page_locked(moments)),) if chosen.offload_optimizer else ()),
    )


def _page_locked(widths: Mapping[nn.Parameter, int]) -> int:
    """Return what tensors of such parameters take, by their bytes an element: PyTorch rounds up to powers of two."""
    sizes = (one.numel() * width for one, width in widths.items())
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def activations_per_token(text: Any, checkpointing: bool) -> int:
    """Return the bytes that a token of a row keeps until the backward pass, in bfloat16.

    Without checkpointing every layer's; with it every layer's input, and one layer's values with their gradients.
    """
    layer = 2 * (10 * text.hidden_size + 4 * text.intermediate_size)
    if not checkpointing:
        return int(text.num_hidden_layers * layer)
    return int(text.num_hidden_layers * 2 * text.hidden_size + 2 * layer)


def _with_what_trains(config: RunConfig, policy: nn.Module) -> nn.Module:
    frozen = frozen_parts(config)
    if config.tuner.train_type == "full":
        freeze(policy, frozen)
        return policy
    with torch.device("meta"):
        return adapt(
            policy,
            frozen,
            adapter_options(config),
            regex=config.tuner.target_regex,
            token_rows=coord_rows(config),
        )
