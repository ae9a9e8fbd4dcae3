"""The policy: a vision-language model from a local directory, what of it trains, and its adapters."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from stage2_api.errors import ConfigError, Problem
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

logger = logging.getLogger(__name__)

LLM, VIT, ALIGNER = "llm", "vit", "aligner"

# The parts of Qwen3-VL by parameter name; the first pattern that matches wins. The aligner (the mergers that project
# patches into the language model's width) lives inside the vision tower.
_PARTS = (
    (ALIGNER, re.compile(r"^model\.visual\.(merger|deepstack_merger_list)\.")),
    (VIT, re.compile(r"^model\.visual\.")),
    (LLM, re.compile(r"^(model\.language_model|lm_head)\.")),
)
_OUTPUT_LAYER = "lm_head"


def load_model(path: Path | str, *, dtype: torch.dtype | None, attn_implementation: str | None) -> Any:
    """Load the model of a local directory, its key-value cache off everywhere.

    `dtype` None keeps the checkpoint's own. Raises ConfigError when `path` is no model directory of a known kind.
    """
    _check_directory(path)
    model = AutoModelForImageTextToText.from_pretrained(
        path,
        dtype="auto" if dtype is None else dtype,
        local_files_only=True,
        **({} if attn_implementation is None else {"attn_implementation": attn_implementation}),
    )
    unknown = sorted({name for name, _ in model.named_parameters() if part_of(name) is None})
    if unknown:
        rule = f"must be a Qwen3-VL model; {type(model).__name__} has the unknown parameter {unknown[0]}"
        raise ConfigError((Problem("model.model", str(path), rule, "use a Qwen3-VL checkpoint"),))
    disable_cache(model)
    return model


def load_processor(path: Path | str) -> Any:
    """Load tokenizer, image processor and chat template of a local directory."""
    _check_directory(path)
    return AutoProcessor.from_pretrained(path, local_files_only=True)


def disable_cache(model: Any) -> None:
    """Turn the key-value cache off in every configuration that is read during a forward pass.

    `Trainer` sets it on the outer configuration only; the text model reads its own, and with a cache the sequences of
    a packed row would see one another without an error.
    """
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False


def part_of(parameter: str) -> str | None:
    """Return which part (llm, vit, aligner) a parameter of the unwrapped model belongs to; None if to none."""
    return next((part for part, pattern in _PARTS if pattern.match(parameter)), None)


def freeze(model: nn.Module, frozen: Iterable[str]) -> None:
    """Stop training of the parts named (`llm`, `vit`, `aligner`); the others train in full."""
    parts = set(frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in parts)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        rule = "at least one part of the model must train"
        way_out = "set one of tuner.freeze_llm, tuner.freeze_vit, tuner.freeze_aligner to false"
        raise ConfigError((Problem("tuner", sorted(parts), rule, way_out),))


def adapt(model: nn.Module, frozen: Iterable[str], options: Mapping[str, Any]) -> PeftModel:
    """Put LoRA or DoRA adapters on the linear layers of the parts that are not frozen.

    `options` are fields of peft's `LoraConfig`; `target_modules`, where given, are names or suffixes of modules, and
    are narrowed down to the parts that train.
    """
    targets = _adapted_modules(model, set(frozen), options.get("target_modules"))
    adapted = get_peft_model(model, LoraConfig(**{**options, "target_modules": targets, "task_type": "CAUSAL_LM"}))
    logger.info("%d layers adapted, %d parameters train", len(targets), trainable_parameters(adapted))
    return adapted


def trainable_parameters(model: nn.Module) -> int:
    """Return how many parameters an optimizer step can change."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def rope_model(model: nn.Module) -> Any:
    """Return the module that has `get_rope_index`, under adapters or without."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return base.model


def _adapted_modules(model: nn.Module, frozen: set[str], wanted: Iterable[str] | None) -> list[str]:
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != _OUTPUT_LAYER and part_of(f"{name}.weight") not in frozen
    ]
    names = None if wanted is None or "all-linear" in wanted else tuple(wanted)
    found = [name for name in linear if names is None or name.endswith(tuple(f".{suffix}" for suffix in names))]
    if not found:
        rule = "must name linear layers in a part of the model that is not frozen"
        way_out = "leave tuner.target_modules out for all of them, or unfreeze a part"
        raise ConfigError((Problem("tuner.target_modules", names, rule, way_out),))
    return found


def _check_directory(path: Path | str) -> None:
    if not (Path(path) / "config.json").is_file():
        rule = "must be a local model directory (with config.json)"
        raise ConfigError((Problem("model.model", str(path), rule, "download the model and give its directory"),))
