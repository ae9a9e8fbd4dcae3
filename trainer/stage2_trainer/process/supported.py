"""The demands of a configuration that the learner does not meet yet: said at the start, never ignored."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.model_files import flaw_of_model, is_mixture, model_path
from stage2_trainer.serve.cuda_driver import Installation, learner_problem

logger = logging.getLogger(__name__)

_MATCHING = "custom.extra.rollout_matching"
MIXTURE_IN_VLLM = "is a mixture of experts, whose weights no vLLM has taken from a learner yet"


@dataclass(frozen=True)
class _Unsupported:
    """A demand that is not met: where it stands, what is asked for, why not, and what to write instead."""

    path: str
    asked: Callable[[RunConfig], object]
    rule: str
    way_out: str


_UNSUPPORTED = (
    _Unsupported(
        "model.attn_impl",
        lambda c: _missing_kernel(c),
        "needs the package flash_attn_interface and a GPU that it knows, and this learner lacks one of them",
        "set it to auto, the kernel that PyTorch brings, or install the package into the image",
    ),
    _Unsupported(
        f"{_MATCHING}.vllm.sync.mode",
        lambda c: "adapter" if _colocates(c) and c.rollout_matching.vllm.sync.mode == "adapter" else None,
        "a colocated engine is given merged weights, from one memory to another; it loads no adapters",
        "set vllm.sync.mode to full",
    ),
    _Unsupported(
        f"{_MATCHING}.vllm.sleep_level",
        lambda c: _sleeps_on_cpu(c),
        "vLLM can sleep on GPUs only",
        "set vllm.sleep_level to 0",
    ),
    _Unsupported(
        "deepspeed.datastates_ckpt",
        lambda c: (deepspeed_config(c) or {}).get("datastates_ckpt") or None,
        "its engine reads checkpoints by means of its own, of which nobody knows whether they run what a file names",
        "leave it out: DeepSpeed then writes with torch.save",
    ),
    _Unsupported(
        "model.model",
        lambda c: _mixture(c),
        MIXTURE_IN_VLLM,
        'train a dense model, or set rollout_backend to hf; stage 1 with training.eval_strategy: "no" asks no vLLM',
    ),
)


def check_supported(config: RunConfig, *, world_size: int) -> None:
    """Raise ConfigError that names every demand of the configuration which this version does not meet."""
    problems = [
        Problem(item.path, value, item.rule, item.way_out)
        for item in _UNSUPPORTED
        if (value := item.asked(config)) is not None
    ]
    problems += _one_process(config, world_size) + _groups(config, world_size) + _zero_stage(config)
    problems += _trackers(config)
    problems += _driver()
    if problems:
        raise ConfigError(problems)
    if config.rollout_matching.offload.enabled and not _colocates(config):
        logger.warning("%s.offload has no effect without a colocated engine", _MATCHING)


def in_process(config: RunConfig) -> bool:
    """Whether the learner's own processes make the rollouts: with hf, or with a colocated vLLM."""
    return config.rollout_matching.rollout_backend == "hf" or config.rollout_matching.vllm.mode == "colocate"


def shards_weights(config: RunConfig) -> bool:
    """Whether DeepSpeed spreads the weights themselves over the processes (ZeRO-3)."""
    stage = (deepspeed_config(config) or {}).get("zero_optimization", {}).get("stage", 0)
    return int(stage) >= 3


def deepspeed_config(config: RunConfig) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration itself, from a file or from the training YAML; None without DeepSpeed."""
    found = config.deepspeed
    if not config.uses_deepspeed or found is None:
        return None
    if isinstance(found, dict) and "config" in found:
        found = found["config"]
    if isinstance(found, dict):
        return {key: value for key, value in found.items() if key != "enabled"}
    if not Path(str(found)).is_file():
        rule = "must be a DeepSpeed configuration or the path of one; named presets are not built in"
        raise ConfigError([Problem("deepspeed", found, rule, "write the JSON file's path, or its content")])
    return _deepspeed_file(Path(str(found)))


def _deepspeed_file(path: Path) -> dict[str, Any]:
    try:
        document = from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        document = error
    if isinstance(document, dict):
        return document
    rule = "must be a file with a JSON object" + (f" ({document})" if isinstance(document, Exception) else "")
    raise ConfigError([Problem("deepspeed", str(path), rule, "mend the file, or write its content here")])


def _trackers(config: RunConfig) -> list[Problem]:
    rule, way_out = "needs the Python package {0}, which is not installed", 'pip install "stage2[{0}]", or leave it out'
    return [
        Problem("training.report_to", tracker, rule.format(tracker), way_out.format(tracker))
        for tracker in config.training.report_to
        if tracker != "none" and find_spec(tracker) is None
    ]


def _missing_kernel(config: RunConfig) -> str | None:
    if config.model.attn_impl != "flash_attention_3":
        return None
    # takes seconds, and only this question needs it
    from transformers.utils.import_utils import is_flash_attn_3_available

    return None if is_flash_attn_3_available() else config.model.attn_impl


def _mixture(config: RunConfig) -> str | None:
    """Return the model where vLLM would have to take the weights of a mixture of experts."""
    if not config.makes_rollouts or config.rollout_matching.rollout_backend != "vllm":
        return None
    try:
        folder = model_path(config.model.model)
    except OSError:  # a hub's name that is not fetched yet: each process of the learner asks again when it is
        return None
    if not (folder / "config.json").is_file() or flaw_of_model(folder):
        return None  # whoever loads it says so
    return config.model.model if is_mixture(folder) else None


def _colocates(config: RunConfig) -> bool:
    matching = config.rollout_matching
    return matching.rollout_backend == "vllm" and matching.vllm.mode == "colocate"


def _sleeps_on_cpu(config: RunConfig) -> int | None:
    level = config.rollout_matching.vllm.sleep_level
    if not level or not _colocates(config):
        return None
    import torch  # takes seconds, and only this question needs it

    return None if torch.cuda.is_available() else level


def _one_process(config: RunConfig, world_size: int) -> list[Problem]:
    if world_size == 1 or in_process(config) or config.rlhf is not None:
        return []
    rule = "in server mode the learner is one process: it alone owns the weight push, and the other GPUs make rollouts"
    way_out = "start the learner without torchrun, as `stage2 learn CONFIG`, or set vllm.mode to colocate"
    return [Problem("WORLD_SIZE", world_size, rule, way_out)]


def _driver() -> list[Problem]:
    """Return why the GPUs of this machine cannot be used, where this installation is one for GPUs."""
    problem = learner_problem(Installation.here(os.environ))
    return [] if problem is None else [problem]


def _groups(config: RunConfig, world_size: int) -> list[Problem]:
    size = config.rollout_matching.vllm.resolved_tensor_parallel_size(world_size)
    if not _colocates(config) or world_size % size == 0:
        return []
    rule = f"must divide the number of learner processes, which is {world_size}"
    path = f"{_MATCHING}.vllm.tensor_parallel_size"
    return [Problem(path, size, rule, "lower it, or start another number of processes")]


def _zero_stage(config: RunConfig) -> list[Problem]:
    if not shards_weights(config) or in_process(config):
        return []
    rule = "weights that ZeRO has partitioned cannot be pushed to servers"
    way_out = "use stage 2, which leaves the weights whole, or set vllm.mode to colocate, or rollout_backend to hf"
    return [Problem("deepspeed.zero_optimization.stage", 3, rule, way_out)]
