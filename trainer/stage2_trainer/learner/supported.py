"""What the configuration may ask for and the learner cannot do yet: said at the start, never ignored."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig

logger = logging.getLogger(__name__)

_MATCHING = "custom.extra.rollout_matching"


@dataclass(frozen=True)
class _Unsupported:
    """A demand that is not met: where it stands, what is asked for, why not, and what to write instead."""

    path: str
    asked: Callable[[RunConfig], object]
    rule: str
    way_out: str


_UNSUPPORTED = (
    _Unsupported(
        f"{_MATCHING}.rollout_backend",
        lambda c: c.rollout_matching.rollout_backend if c.rollout_matching.rollout_backend != "vllm" else None,
        "this version makes rollouts with vLLM servers only",
        "set rollout_backend to vllm and vllm.mode to server",
    ),
    _Unsupported(
        f"{_MATCHING}.vllm.mode",
        lambda c: c.rollout_matching.vllm.mode if c.rollout_matching.vllm.mode != "server" else None,
        "this version makes rollouts with vLLM servers only",
        "set vllm.mode to server and name the servers in vllm.server.servers",
    ),
    _Unsupported(
        f"{_MATCHING}.post_rollout_pack_scope",
        lambda c: "window" if c.rollout_matching.post_rollout_pack_scope == "window" else None,
        "this version packs each micro-step by itself",
        "set post_rollout_pack_scope to micro",
    ),
    _Unsupported(
        f"{_MATCHING}.loss_normalizer",
        lambda c: c.rollout_matching.loss_normalizer if _counts_windows(c) else None,
        "this version trains on each micro-step before the next one's rollouts, so a window's tokens are not counted",
        "set loss_normalizer to micro, or make a micro-step the whole window (gradient accumulation 1)",
    ),
    _Unsupported(
        f"{_MATCHING}.rollout_buffer.m_steps",
        lambda c: _reused_steps(c) if _reused_steps(c) > 1 else None,
        "this version makes fresh rollouts for every optimizer step",
        "set m_steps to 1, or rollout_buffer.enabled to false",
    ),
    _Unsupported(
        f"{_MATCHING}.monitor_dump.enabled",
        lambda c: c.rollout_matching.monitor_dump.enabled or None,
        "this version writes no dumps; rollouts.jsonl in the output folder has every rollout with its matches",
        "set monitor_dump.enabled to false",
    ),
    _Unsupported(
        f"{_MATCHING}.desc_monitor.enabled",
        lambda c: c.rollout_matching.desc_monitor.enabled or None,
        "this version does not compare descriptions; rollouts.jsonl in the output folder has those of every match",
        "set desc_monitor.enabled to false",
    ),
)


def check_supported(config: RunConfig, *, world_size: int) -> None:
    """Raise ConfigError that names every demand of the configuration which this version does not meet."""
    problems = [
        Problem(item.path, value, item.rule, item.way_out)
        for item in _UNSUPPORTED
        if (value := item.asked(config)) is not None
    ]
    problems += _one_process(world_size) + _zero_stage(config)
    if problems:
        raise ConfigError(problems)
    if config.rollout_matching.offload.enabled:
        logger.warning("%s.offload has no effect in server mode: the servers have GPUs of their own", _MATCHING)


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
    document: dict[str, Any] = json.loads(Path(str(found)).read_text(encoding="utf-8"))
    return document


def _reused_steps(config: RunConfig) -> int:
    buffer = config.rollout_matching.rollout_buffer
    return buffer.m_steps if buffer.enabled else 1


def _counts_windows(config: RunConfig) -> bool:
    return config.rollout_matching.loss_normalizer == "window" and config.gradient_accumulation_steps() > 1


def _one_process(world_size: int) -> list[Problem]:
    if world_size == 1:
        return []
    rule = "in server mode the learner is one process: it alone owns the weight push, and the other GPUs make rollouts"
    return [Problem("WORLD_SIZE", world_size, rule, "start the learner without torchrun, as `stage2 learn CONFIG`")]


def _zero_stage(config: RunConfig) -> list[Problem]:
    stage = (deepspeed_config(config) or {}).get("zero_optimization", {}).get("stage", 0)
    if stage < 3:
        return []
    rule = "weights that ZeRO has partitioned cannot be pushed to servers"
    return [
        Problem("deepspeed.zero_optimization.stage", stage, rule, "use stage 2: one learner process has all of them")
    ]
