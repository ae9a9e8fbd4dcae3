"""The optimizer and the learning-rate schedule, as transformers names and builds them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from stage2_trainer.model.deepspeed_config import settle_options
from stage2_trainer.model.policy import split_learning_rates

NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of parameters without weight decay, as in transformers."""


def create_optimizer(policy: Any, args: TrainingArguments, rates: Mapping[str, float]) -> torch.optim.Optimizer:
    """Return the optimizer of a policy. rates: learning rates of the parts (llm, vit, aligner) that have their own.

    A checkpoint knows its state by position: two groups, also where one is empty, in the order of the parameters.
    """
    decayed = set(get_parameter_names(policy, [nn.LayerNorm], NO_DECAY))
    named = [(name, one) for name, one in policy.named_parameters() if one.requires_grad]
    groups = [
        {"params": [one for name, one in named if name in decayed], "weight_decay": args.weight_decay},
        {"params": [one for name, one in named if name not in decayed], "weight_decay": 0.0},
    ]
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, policy)
    optimizer: torch.optim.Optimizer = kind(groups, **options)
    if options.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(policy)
    split_learning_rates(optimizer, policy, rates)
    return optimizer


def create_schedule(optimizer: Any, args: TrainingArguments, steps: int) -> Any:
    """Return the schedule of the prepared optimizer over so many steps."""
    options: Any = args.lr_scheduler_kwargs
    return get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(steps), steps, options)


def create_for_deepspeed(
    policy: Any, args: TrainingArguments, rates: Mapping[str, float], steps: int, config: Any
) -> list[Any]:
    """Return the optimizer for DeepSpeed, and the schedule where DeepSpeed builds either of them.

    config: the `HfTrainerDeepSpeedConfig`, whose `auto` values are set to what policy, options and steps say. Raises
    ConfigError if others differ from the training section.
    """
    from accelerate.utils import DummyOptim, DummyScheduler

    settle_options(config, args, policy, steps)
    if "optimizer" in config.config:
        optimizer: Any = DummyOptim([one for one in policy.parameters() if one.requires_grad])
        build: Any = partial(create_schedule, args=args, steps=steps)
    else:
        optimizer, build = create_optimizer(policy, args, rates), None
        config.config["zero_allow_untested_optimizer"] = True
    if "scheduler" in config.config:
        return [optimizer, DummyScheduler(optimizer)]
    return [optimizer, DummyScheduler(optimizer, lr_scheduler_callable=build)] if build else [optimizer]


def _keep_embeddings_in_32_bits(policy: nn.Module) -> None:
    """Keep the optimizer's state of embeddings in 32 bits: few of their rows have a gradient in a step."""
    manager = import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    for module in policy.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
