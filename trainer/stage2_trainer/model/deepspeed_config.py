"""The DeepSpeed configuration of a run, which is a file, or stands in the training YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import from_json

from stage2_api.errors import refused
from stage2_api.runconfig import RunConfig

_FROM_TRAINING = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
)  # fmt: skip

_OF_ANY = ("lr", "weight_decay")
_OF_ADAM = (*_OF_ANY, "betas", "eps")


def shards_weights(config: RunConfig) -> bool:
    """Whether DeepSpeed spreads the weights themselves over the processes (ZeRO-3)."""
    stage = (deepspeed_config(config) or {}).get("zero_optimization", {}).get("stage", 0)
    return int(stage) >= 3


def deepspeed_options(config: RunConfig) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration, with the training section's values where it leaves out what they set.

    DeepSpeed has values of its own for what is left out: it would clip gradients at 1.0, and step at another rate.
    """
    given = deepspeed_config(config)
    if given is None:
        return None
    options = dict.fromkeys(_FROM_TRAINING, "auto") | given
    if "optimizer" in options:
        optimizer: dict[str, Any] = options["optimizer"]
        names = _OF_ADAM if str(optimizer.get("type")).lower() in ("adam", "adamw") else _OF_ANY
        options["optimizer"] = optimizer | {"params": dict.fromkeys(names, "auto") | optimizer.get("params", {})}
    return options


def deepspeed_config(config: RunConfig) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration, from a file or from the training YAML; None without DeepSpeed."""
    deepspeed = config.deepspeed
    if not config.uses_deepspeed or deepspeed is None:
        return None
    if isinstance(deepspeed, dict) and "config" in deepspeed:
        deepspeed = deepspeed["config"]
    if isinstance(deepspeed, dict):
        return {key: value for key, value in deepspeed.items() if key != "enabled"}
    path = Path(str(deepspeed))
    if not path.is_file():
        rule = "must be a DeepSpeed configuration or the path of one; named presets are not built in"
        raise refused("deepspeed", deepspeed, rule, "write the JSON file's path, or its content")
    try:
        document = from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        document = error
    if isinstance(document, dict):
        return document
    rule = "must be a file with a JSON object" + (f" ({document})" if isinstance(document, Exception) else "")
    raise refused("deepspeed", str(path), rule, "correct the file, or write its content here")
