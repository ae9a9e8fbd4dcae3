"""Checks at the start for what a configuration demands and this learner cannot do; nothing is silently ignored."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.model_files import flaw_of_model, is_mixture, model_path
from stage2_trainer.model.deepspeed_config import deepspeed_config, shards_weights
from stage2_trainer.process.cuda_driver import Installation, learner_problem

logger = logging.getLogger(__name__)

_MATCHING = "custom.extra.rollout_matching"
_REPLACED = {
    "optimizer": ("optim", "vit_lr", "aligner_lr"), "scheduler": ("lr_scheduler_type", "lr_scheduler_kwargs"),
}  # fmt: skip
"""Keys of the training section in whose place a part of DeepSpeed's configuration comes."""
_SCALES_RATES = "WarmupCosineLR"
"""The scheduler of DeepSpeed that keeps the rates of parts: any other gives all of them one rate."""
MIXTURE_IN_VLLM = "is a mixture of experts, whose weights no vLLM has taken from a learner yet"


def check_supported(config: RunConfig, *, world_size: int) -> None:
    """Raise ConfigError that names every demand of the configuration which this version does not meet."""
    problems = [
        *_attention(config),
        *_engine(config),
        *_mixture(config),
        *_processes(config, world_size),
        *deepspeed_problems(config),
        *_packages(config),
    ]
    if driver := learner_problem(Installation.detect(os.environ)):
        problems.append(driver)
    if problems:
        raise ConfigError(problems)
    if config.rollout_matching.offload.enabled and not config.rollout_matching.colocates:
        logger.warning("%s.offload has no effect without a colocated engine", _MATCHING)


def _attention(config: RunConfig) -> list[Problem]:
    if config.model.attn_impl != "flash_attention_3":
        return []
    # takes seconds, and only this check needs it
    from transformers.utils.import_utils import is_flash_attn_3_available

    if is_flash_attn_3_available():
        return []
    rule = "needs the package flash_attn_interface and a GPU that it knows, and this learner lacks one of them"
    way_out = "set it to auto, the kernel that PyTorch brings, or install the package into the image"
    return [Problem("model.attn_impl", config.model.attn_impl, rule, way_out)]


def _engine(config: RunConfig) -> list[Problem]:
    """Return what a colocated engine cannot do."""
    if not config.rollout_matching.colocates:
        return []
    vllm, problems = config.rollout_matching.vllm, []
    if vllm.sync.mode == "adapter":
        rule = "a colocated engine is given merged weights, from one memory to another; it loads no adapters"
        problems.append(Problem(f"{_MATCHING}.vllm.sync.mode", "adapter", rule, "set vllm.sync.mode to full"))
    if vllm.sleep_level:
        import torch  # takes seconds, and only this check needs it

        if not torch.cuda.is_available():
            path, rule = f"{_MATCHING}.vllm.sleep_level", "vLLM can sleep on GPUs only"
            problems.append(Problem(path, vllm.sleep_level, rule, "set vllm.sleep_level to 0"))
    return problems


def _mixture(config: RunConfig) -> list[Problem]:
    """Return that vLLM would have to take the weights of a mixture of experts."""
    if not config.makes_rollouts or config.rollout_matching.rollout_backend != "vllm":
        return []
    try:
        folder = model_path(config.model.model)
    except OSError:  # a hub's name that is not fetched yet: each learner process checks again once it is
        return []
    if not (folder / "config.json").is_file() or flaw_of_model(folder):
        return []  # the loader of the model reports it
    if not is_mixture(folder):
        return []
    way_out = (
        'train a dense model, or set rollout_backend to hf; stage 1 needs no vLLM with training.eval_strategy: "no"'
    )
    return [Problem("model.model", config.model.model, MIXTURE_IN_VLLM, way_out)]


def _processes(config: RunConfig, world_size: int) -> list[Problem]:
    problems = []
    if world_size > 1 and config.rollout_matching.uses_servers and config.rlhf is None and not config.shares_rows:
        rule = "in server mode the learner is one process by default, and the other GPUs make rollouts"
        way_out = (
            "start the learner without torchrun, as `stage2 learn CONFIG`, or set vllm.server.learners to sharded, or"
            " vllm.mode to colocate"
        )
        problems.append(Problem("WORLD_SIZE", world_size, rule, way_out))
    size = config.rollout_matching.vllm.resolved_tensor_parallel_size(world_size)
    if config.rollout_matching.colocates and world_size % size:
        rule = f"must divide the number of learner processes, which is {world_size}"
        way_out = "lower it, or start another number of processes"
        problems.append(Problem(f"{_MATCHING}.vllm.tensor_parallel_size", size, rule, way_out))
    return problems


def deepspeed_problems(config: RunConfig) -> list[Problem]:
    """Return what a DeepSpeed configuration holds that this version does not take, whatever DeepSpeed says of it.

    Raises:
        ConfigError: it cannot be read.
    """
    problems = []
    deepspeed = deepspeed_config(config)
    if engine := (deepspeed or {}).get("datastates_ckpt"):
        rule = "its engine reads checkpoints in its own way, and may run what a file names"
        way_out = "leave it out: DeepSpeed then writes with torch.save"
        problems.append(Problem("deepspeed.datastates_ckpt", engine, rule, way_out))
    if deepspeed is not None and "zero_optimization" not in deepspeed:
        rule, way_out = "must hold zero_optimization", "write zero_optimization: {stage: 2}, or leave deepspeed out"
        problems.append(Problem("deepspeed", deepspeed, rule, way_out))
    if (autocast := (deepspeed or {}).get("torch_autocast")) and autocast.get("enabled"):
        rule = "is a precision beside training.bf16 and training.fp16"
        way_out = "leave it out; with training.bf16 DeepSpeed holds weights in bfloat16, with copies in float32"
        problems.append(Problem("deepspeed.torch_autocast", autocast, rule, way_out))
    if deepspeed is not None:
        problems.extend(_ignored(config, deepspeed))
        problems.extend(_adagrad(config, deepspeed))
    if shards_weights(config) and config.rollout_matching.uses_servers and not config.shares_rows:
        rule = "weights that ZeRO has partitioned cannot be pushed to servers by one process alone"
        way_out = "use stage 2, which leaves the weights whole" + (
            "" if config.rlhf else ", or set vllm.server.learners to sharded"
        )
        problems.append(Problem("deepspeed.zero_optimization.stage", 3, rule, way_out))
    if shards_weights(config) and config.tuner.train_coord_rows:
        rule = "PEFT computes no gradients of rows of a table that ZeRO has partitioned"
        way_out = "set it to false, use ZeRO's stage 2, or set tuner.train_type to full"
        problems.append(Problem("tuner.train_coord_rows", True, rule, way_out))
    return problems


def _ignored(config: RunConfig, deepspeed: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what DeepSpeed would replace although the training section sets it."""
    given = config.training.model_dump(exclude_unset=True, exclude_none=True)
    replaced = dict(_REPLACED)
    if deepspeed.get("scheduler", {}).get("type") != _SCALES_RATES:
        replaced["scheduler"] += ("vit_lr", "aligner_lr")
    for part, keys in replaced.items():
        if part in deepspeed and (lost := [f"training.{key}" for key in keys if key in given]):
            rule = f"DeepSpeed's own {part} takes the place of {', '.join(lost)}, which would have no effect"
            yield Problem(f"deepspeed.{part}", deepspeed[part], rule, f"leave it out, or leave out {', '.join(lost)}")


def _adagrad(config: RunConfig, deepspeed: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield that ZeRO builds PyTorch's Adagrad anew, as of DeepSpeed 0.19.8; it builds one of its own to offload it."""
    offload = deepspeed.get("zero_optimization", {}).get("offload_optimizer", {})
    path, kind = "training.optim", config.training.optim
    if "optimizer" in deepspeed:
        path, kind = "deepspeed.optimizer.type", deepspeed["optimizer"].get("type")
    if str(kind).lower() == "adagrad" and offload.get("device", "none") == "none":
        rule = "ZeRO builds it anew: it ignores the schedule and the rates of parts, and may not resume"
        yield Problem(path, kind, rule, "choose another optimizer, or leave deepspeed out")


def _packages(config: RunConfig) -> list[Problem]:
    """Return what needs a package that is not installed, which an extra of ours has."""
    rule, way_out = "needs the Python package {0}, which is not installed", 'pip install "stage2[{0}]", or leave it out'
    asked: list[tuple[str, Any, str]] = [
        ("training.report_to", tracker, tracker) for tracker in config.training.report_to if tracker != "none"
    ]
    if config.uses_deepspeed:
        asked.append(("deepspeed", config.deepspeed, "deepspeed"))
    return [
        Problem(path, value, rule.format(package), way_out.format(package))
        for path, value, package in asked
        if find_spec(package) is None
    ]
