"""The DeepSpeed configuration of a run, which is a file, or stands in the training YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic_core import ValidationError, from_json

from stage2_api.errors import ConfigError, Problem, refused
from stage2_api.runconfig import RunConfig

_FROM_TRAINING = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
)  # fmt: skip
DTYPES = ("bf16", "fp16")
"""Blocks of DeepSpeed's configuration that hold the weights in 16 bits, and the keys of `training` of the same name."""
_OF_ANY = ("lr", "weight_decay")
_OF_ADAM = (*_OF_ANY, "betas", "eps")
_OPTIMIZERS = {"adam": _OF_ADAM, "adamw": _OF_ADAM}
_SCHEDULERS = {
    "warmuplr": ("warmup_max_lr", "warmup_num_steps"),
    "warmupdecaylr": ("warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    "warmupcosinelr": ("warmup_num_steps", "total_num_steps"),
}
_BLOCKS = (
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "optimizer",
    "optimizer.params", "scheduler", "scheduler.params", "torch_autocast", *DTYPES,
)  # fmt: skip
_STAGES = (1, 2, 3)
_OF_BUILDING = (TypeError, ValueError, AssertionError)
"""What DeepSpeed raises where it cannot build an optimizer or a schedule."""
_DIFFERING = re.compile(r"^- ds (\S+?)=.* vs hf (.*)$", re.MULTILINE)


def shards_weights(config: RunConfig) -> bool:
    """Whether DeepSpeed spreads the weights themselves over the processes (ZeRO-3)."""
    return zero_stage(deepspeed_config(config) or {}) >= 3


def zero_stage(options: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO of a DeepSpeed configuration."""
    stage: int = options.get("zero_optimization", {}).get("stage", 0)
    return stage


def deepspeed_options(config: RunConfig) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration, with the training section's values where it leaves out what they set.

    DeepSpeed has values of its own for what is left out: it would clip gradients at 1.0, step at another rate, warm up
    for 1000 steps, and compute in float32 where a block `bf16` does not say whether it is enabled.
    """
    given = deepspeed_config(config)
    if given is None:
        return None
    options = dict.fromkeys(_FROM_TRAINING, "auto") | given
    options |= {dtype: {"enabled": "auto"} | given.get(dtype, {}) for dtype in DTYPES}
    if "optimizer" in options:
        options["optimizer"] = _completed(options["optimizer"], _OPTIMIZERS, otherwise=_OF_ANY)
    if "scheduler" in options:
        options["scheduler"] = _completed(options["scheduler"], _SCHEDULERS)
    return options


def check_options(options: Any, args: Any, policy: Any) -> None:
    """Raise ConfigError as `settle_options` does, but for a scheduler: the number of steps may not be known yet."""
    known = deepcopy(options)
    known.config.pop("scheduler", None)
    settle_options(known, args, policy, 0)


def settle_options(options: Any, args: Any, policy: Any, steps: int) -> None:
    """Set the `auto` values of a `HfTrainerDeepSpeedConfig` to what training section, policy and steps say.

    Raises:
        ConfigError: others differ from the training section, or DeepSpeed does not take them.
    """
    try:
        options.trainer_config_finalize(args, policy, steps)
    except ValueError as error:
        rule = "must agree with the training section, which has {}"
        differing = [
            Problem(f"deepspeed.{key}", options.get_value(key), rule.format(ours), "write auto for it")
            for key, ours in _DIFFERING.findall(str(error))
        ]
        raise ConfigError(differing or [Problem("deepspeed", "auto", str(error), "write a number")]) from error
    _check_taken(options.config)


def _check_taken(settled: Mapping[str, Any]) -> None:
    """Raise ConfigError, in DeepSpeed's words, if it does not take these settled options.

    It would say so itself as it builds the engine, with an error that does not tell a person's mistake from others.
    """
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig

    _check_type(settled, "optimizer", DEEPSPEED_OPTIMIZERS, torch.optim)
    _check_type(settled, "scheduler", lr_schedules.VALID_LR_SCHEDULES)  # PyTorch's do not take ZeRO's optimizer
    # The size of all processes' batch is compared already, and DeepSpeed would compare it with processes to come.
    options = {key: deepcopy(value) for key, value in settled.items() if key != "train_batch_size"}
    with as_config_errors((Exception,)):  # pydantic's, its own, assertions, and what values of another type raise
        DeepSpeedConfig(options)


@contextmanager
def as_config_errors(kinds: tuple[type[Exception], ...] = _OF_BUILDING) -> Iterator[None]:
    """Raise ConfigError, in DeepSpeed's words, where it raises one of these kinds of error: it refuses its options."""
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        raise refused("deepspeed", None, f"DeepSpeed does not take it ({_words(error)})", "correct it") from error


def _check_type(settled: Mapping[str, Any], part: str, known: Sequence[str], others: ModuleType | None = None) -> None:
    """Raise ConfigError if DeepSpeed neither knows the type of this part, its optimizers in any case, nor finds it."""
    if part not in settled:
        return
    kind = settled[part].get("type")
    if not {str(kind), str(kind).lower()} & {*known} and not hasattr(others, str(kind)):
        rule = f"must be one of {', '.join(known)}" + (f", or a class of {others.__name__}" if others else "")
        raise refused(f"deepspeed.{part}.type", kind, rule, f"write one of them, or leave deepspeed.{part} out")


def _words(error: Exception) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))
    return " ".join(f"{type(error).__name__}: {error}".split())


def deepspeed_file(config: RunConfig) -> Path | None:
    """Return the file of the DeepSpeed configuration; None without DeepSpeed, or if the training YAML holds it."""
    given = _given(config)
    return None if given is None or isinstance(given, dict) else Path(str(given))


def deepspeed_config(config: RunConfig) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration, from a file or from the training YAML; None without DeepSpeed."""
    deepspeed, path = _given(config), deepspeed_file(config)
    if isinstance(deepspeed, dict):
        return _checked({key: value for key, value in deepspeed.items() if key != "enabled"})
    if path is None:
        return None
    if not path.is_file():
        rule = "must be a DeepSpeed configuration or the path of one; named presets are not built in"
        raise refused("deepspeed", deepspeed, rule, "write the JSON file's path, or its content")
    try:
        document = from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        document = error
    if isinstance(document, dict):
        return _checked(document)
    rule = "must be a file with a JSON object" + (f" ({document})" if isinstance(document, Exception) else "")
    raise refused("deepspeed", str(path), rule, "correct the file, or write its content here")


def _given(config: RunConfig) -> Any:
    """Return what stands for the DeepSpeed configuration: a mapping, a file, or None without DeepSpeed."""
    deepspeed = config.deepspeed if config.uses_deepspeed else None
    return deepspeed["config"] if isinstance(deepspeed, dict) and "config" in deepspeed else deepspeed


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return options whose blocks are mappings, with a stage of ZeRO if they have ZeRO. Raises ConfigError for others.

    At stage 0 DeepSpeed 0.19.8 measures no gradient norm, and trains 16-bit weights without copies in float32.
    """
    for path in _BLOCKS:
        block = reduce(lambda section, key: section.get(key, {}), path.split("."), options)
        if not isinstance(block, dict):
            raise refused(f"deepspeed.{path}", block, "must be a mapping", "write its keys, or leave it out")
    if "zero_optimization" in options and (stage := zero_stage(options)) not in _STAGES:
        rule = "must be 1, 2 or 3: at stage 0, the default, DeepSpeed divides nothing among processes"
        raise refused("deepspeed.zero_optimization.stage", stage, rule, "write one of them, or leave deepspeed out")
    return options


def _completed(
    part: Mapping[str, Any], known: Mapping[str, tuple[str, ...]], otherwise: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return an optimizer or a scheduler with `auto` for those of its known parameters that it leaves out."""
    names = known.get(str(part.get("type")).lower(), otherwise)
    return {**part, "params": dict.fromkeys(names, "auto") | part.get("params", {})}
