"""The folder of a stock Qwen3-VL, checked before anything heavy is imported."""

from __future__ import annotations

import json
import os
from pathlib import Path

from stage2_api.errors import refused
from stage2_trainer.data.model_files import fetched_model, flaw_of_model, require_plain

AGAIN = "download it again, or compare its files with their source"
KIND = "qwen3_vl"  # qwen3_vl_moe starts with it too


def source_of(model: str) -> Path:
    """Return the folder of a Qwen3-VL, downloaded if `model` is a name on a hub. Raises ConfigError."""
    folder = fetched_model(model, path="MODEL")
    if not os.path.isfile(folder / "config.json"):
        rule = "must be the folder of a model (with config.json), or the name of one on a hub"
        raise refused("MODEL", model, rule, "download it where there is a network, and give its folder")
    if flaw := flaw_of_model(folder):
        raise refused("MODEL", model, flaw, AGAIN)
    require_plain(folder, path="MODEL", value=model)
    config = json.loads((folder / "config.json").read_bytes())
    kind = config.get("model_type")
    if not str(kind).startswith(KIND):
        raise refused("MODEL", model, f"must be a Qwen3-VL; its config.json has model_type {kind}", "give a Qwen3-VL")
    if config.get("quantization_config"):
        rule = "must not be quantised, because it will be trained; its config.json has a quantization_config"
        raise refused("MODEL", model, rule, "give the model before quantisation")
    return folder
