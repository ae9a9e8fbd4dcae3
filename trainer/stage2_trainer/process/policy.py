"""The policy: the model that trains, and what others need of it to make rollouts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, set_seed

from stage2_api.errors import ConfigError, Problem
from stage2_api.rules.run import NARROW_WEIGHTS, WIDEN_WEIGHTS
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.encode import Encoder
from stage2_trainer.process import training_arguments as arguments
from stage2_trainer.process.attention import HALF_FORMATS, attention_here
from stage2_trainer.process.qwen3_vl import adapt, coord_vocab, freeze, load_model
from stage2_trainer.serve.cuda_driver import Installation, unused_gpu
from stage2_trainer.sync.fleet.probe import Probe


@dataclass(frozen=True)
class Policy:
    """The model that trains, how it reads prompts, where its weights are, and a prompt that proves them."""

    model: Any
    encoder: Encoder
    device: torch.device
    probe: Probe


def load_policy(config: RunConfig) -> Any:
    """Load the model, freeze what does not train, and put the adapters on.

    Adapters begin with random values: seeded, so that a run can be repeated, and all processes begin with the same.
    """
    _require_gpu()
    set_seed(config.training.seed)
    attention = attention_here(config.model.attn_impl)
    model = load_model(
        config.model.model,
        dtype=arguments.dtype(config),
        attn_implementation=attention,
        pickled=config.model.allow_pickled_weights,
        remote_code=config.model.allow_remote_code,
    )
    frozen = arguments.frozen_parts(config)
    if config.tuner.train_type == "full":
        freeze(model, frozen)
    else:
        rows = coord_rows(config)
        model = adapt(
            model, frozen, arguments.adapter_options(config), regex=config.tuner.target_regex, token_rows=rows
        )
    _require_wide_weights(model, config)
    return model


def coord_rows(config: RunConfig) -> list[int]:
    """Return the tokens whose rows train beside adapters (`tuner.train_coord_rows`)."""
    if not config.tuner.train_coord_rows:
        return []
    folder, trusted = config.model.model, config.model.allow_remote_code
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
    return [int(one) for one in coord_vocab(tokenizer, folder).ids]


def _require_gpu() -> None:
    """Raise ConfigError where this process should train on a GPU that PyTorch cannot use."""
    if problem := unused_gpu(Installation.here(os.environ), available=torch.cuda.is_available()):
        raise ConfigError((problem,))


def _require_wide_weights(model: Any, config: RunConfig) -> None:
    """Raise ConfigError where weights of 16 bits train; DeepSpeed keeps copies of its own in float32."""
    if config.uses_deepspeed:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in HALF_FORMATS:
            rule = f"{name} would train in {str(parameter.dtype).removeprefix('torch.')}: {NARROW_WEIGHTS}"
            raise ConfigError((Problem("model.torch_dtype", config.model.torch_dtype, rule, WIDEN_WEIGHTS),))
