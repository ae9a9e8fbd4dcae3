"""The policy: a Qwen3-VL model from a local directory, its parts that train, and its adapters."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, set_seed

from stage2_api.errors import ConfigError, refused
from stage2_api.rules.run import NARROW_WEIGHTS, WIDEN_WEIGHTS
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.model_files import flaw_of_model
from stage2_trainer.matching import CoordVocab
from stage2_trainer.matching.closing import take_bias
from stage2_trainer.model.attention import HALF_FORMATS, attention_here, pack_vision_tower
from stage2_trainer.model.transformers_compat import disable_cache, layout_fault
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.cuda_driver import Installation, unused_gpu
from stage2_trainer.sync.fleet.proof import Probe

logger = logging.getLogger(__name__)

LLM, VIT, ALIGNER = "llm", "vit", "aligner"

_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # what an image processor calls them
# The parts of Qwen3-VL by parameter name; the first pattern that matches wins. The aligner (the mergers that project
# patches into the language model's width) lives inside the vision tower.
_PARTS = (
    (ALIGNER, re.compile(r"^model\.visual\.(merger|deepstack_merger_list)\.")),
    (VIT, re.compile(r"^model\.visual\.")),
    (LLM, re.compile(r"^(model\.language_model|lm_head)\.")),
)
_INPUT_LAYER, _OUTPUT_LAYER = "embed_tokens", "lm_head"
_ADAPTED = "base_model.model."  # what peft puts before names
_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Policy:
    """The model that trains, how it reads prompts, where its weights are, and the prompt of its pushes' proofs."""

    model: Any
    encoder: Encoder
    device: torch.device
    probe: Probe


def load_policy(config: RunConfig) -> Any:
    """Load the model, freeze what does not train, and add the adapters.

    The random values with which adapters begin are seeded: runs are repeatable, and all processes begin alike.
    """
    if problem := unused_gpu(Installation.detect(os.environ), available=torch.cuda.is_available()):
        raise ConfigError((problem,))
    set_seed(config.training.seed)
    attention = attention_here(config.model.attn_impl)
    with ACTIVITY.doing(f"loading the model {config.model.model}"):
        model = load_model(
            config.model.model,
            dtype=weights_dtype(config),
            attn_implementation=attention,
            pickled=config.model.allow_pickled_weights,
            remote_code=config.model.allow_remote_code,
        )
    take_bias(model.generation_config)  # training learns from answers of the model as it is
    frozen = frozen_parts(config)
    if config.tuner.train_type == "full":
        freeze(model, frozen)
    else:
        rows = coord_rows(config)
        model = adapt(model, frozen, adapter_options(config), regex=config.tuner.target_regex, token_rows=rows)
    _require_wide_weights(model, config)
    return model


def coord_rows(config: RunConfig) -> list[int]:
    """Return the ids of the tokens whose rows train beside adapters (`tuner.train_coord_rows`)."""
    if not config.tuner.train_coord_rows:
        return []
    folder, trusted = config.model.model, config.model.allow_remote_code
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
    return [int(one) for one in coord_vocab(tokenizer, folder).ids]


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype | None,
    attn_implementation: str | None,
    pickled: bool = False,
    remote_code: bool = False,
) -> Any:
    """Load the model of a local directory, with its key-value cache off.

    dtype: None keeps that of the checkpoint. pickled: whether weights that are not safetensors are loaded. remote_code:
    whether code of the directory is run. Raises ConfigError if `path` is no directory of a Qwen3-VL model.
    """
    _check_directory(path)
    model = AutoModelForImageTextToText.from_pretrained(
        path,
        dtype="auto" if dtype is None else dtype,
        local_files_only=True,
        trust_remote_code=remote_code,
        use_safetensors=None if pickled else True,
        **({} if attn_implementation is None else {"attn_implementation": attn_implementation}),
    )
    unknown = sorted({name for name, _ in model.named_parameters() if part_of(name) is None})
    if unknown:
        rule = f"must be a Qwen3-VL model; {type(model).__name__} has the unknown parameter {unknown[0]}"
        raise refused("model.model", str(path), rule, "use a Qwen3-VL checkpoint")
    if fault := layout_fault(model):
        raise refused("model.model", str(path), fault, "use another checkpoint")
    disable_cache(model)
    pack_vision_tower(model)
    return model


def load_processor(path: Path | str, remote_code: bool = False, /, **pixel_limits: int) -> Any:
    """Load tokenizer, image processor and chat template of a local directory.

    remote_code: whether code of the directory is run. pixel_limits: `min_pixels` and `max_pixels` of an image, in place
    of the directory's own.
    """
    _check_directory(path)
    with ACTIVITY.doing(f"loading the tokenizer of {path}"):
        processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=remote_code)
    if pixel_limits:  # from_pretrained would give them to the tokenizer too, and each call would warn of them
        images = processor.image_processor
        limits = {_EDGES[name]: limit for name, limit in pixel_limits.items()}
        images.size = type(images.size)(**{**dict(images.size), **limits})
    return processor


def coord_vocab(tokenizer: Any, model: str) -> CoordVocab:
    """Return the coordinate tokens of a model's tokenizer. Raises ConfigError if it lacks one."""
    try:
        return CoordVocab.from_tokenizer(tokenizer)
    except ValueError as error:
        way_out = f"stage2 prepare {model} --output DIR adds them; then train stage 1"
        raise refused("model.model", model, str(error).partition("; add")[0], way_out) from error


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
        raise refused("tuner", sorted(parts), rule, way_out)


def adapt(
    model: nn.Module,
    frozen: Iterable[str],
    options: Mapping[str, Any],
    *,
    regex: str | None = None,
    token_rows: Sequence[int] = (),
) -> PeftModel:
    """Add LoRA or DoRA adapters to linear layers of the parts that are not frozen.

    options: fields of peft's `LoraConfig`; its `target_modules` are ends of module names, or `all-linear`. regex: takes
    precedence over them, and must match a module's whole name. token_rows: ids of tokens whose rows in the input and
    output tables train too, in float32; tied tables share them. The output layer never gets an adapter.
    """
    if not regex:
        _require_known(model, options["target_modules"])
    wanted = _by_regex(regex) if regex else _by_name(options["target_modules"])
    targets = _adapted_modules(model, set(frozen), wanted)
    if not targets:
        path, value = ("tuner.target_regex", regex) if regex else ("tuner.target_modules", options["target_modules"])
        rule = "must name linear layers in a part of the model that is not frozen"
        raise refused(path, value, rule, "write target_modules: [all-linear], or unfreeze a part")
    _require_whole_tie(model, options.get("modules_to_save") or ())
    chosen = {**options, "target_modules": targets, "trainable_token_indices": _rows_of_tables(model, token_rows)}
    adapted = get_peft_model(model, LoraConfig(**chosen, task_type="CAUSAL_LM"))
    logger.info("%d layers have adapters, %d parameters are trained", len(targets), trainable_parameters(adapted))
    return adapted


def trainable_parameters(model: nn.Module) -> int:
    """Return how many parameters an optimizer step can change."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def rope_model(model: nn.Module) -> Any:
    """Return the module that has `get_rope_index`, under adapters or without."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return base.model


def output_table(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight (V, H) and bias of the output layer, with trained rows in place."""
    head = model.get_output_embeddings()
    return head.weight, getattr(head, "bias", None)


def part_rates(config: RunConfig) -> dict[str, float]:
    """Return the learning rates of the parts (vit, aligner) that have their own."""
    rates = {VIT: config.training.vit_lr, ALIGNER: config.training.aligner_lr}
    return {part: rate for part, rate in rates.items() if rate is not None}


def split_learning_rates(optimizer: torch.optim.Optimizer, model: nn.Module, rates: Mapping[str, float]) -> None:
    """Give the parts named in `rates` (llm, vit, aligner) their own learning rates and parameter groups."""
    parts = {parameter: part_of(name.removeprefix(_ADAPTED)) for name, parameter in model.named_parameters()}
    for group in list(optimizer.param_groups):
        for part, rate in rates.items():
            moved = [parameter for parameter in group["params"] if parts[parameter] == part]
            if moved:
                group["params"] = [parameter for parameter in group["params"] if parts[parameter] != part]
                optimizer.add_param_group({**group, "params": moved, "lr": rate})


def _rows_of_tables(model: Any, token_rows: Sequence[int]) -> dict[str, list[int]] | None:
    """Return the rows that train of each table; a tied table follows the other."""
    if not token_rows:
        return None
    tables = (_INPUT_LAYER,) if _is_tied(model) else (_INPUT_LAYER, _OUTPUT_LAYER)
    return {table: list(token_rows) for table in tables}


def _is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _require_whole_tie(model: Any, trained_whole: Sequence[str]) -> None:
    """Raise ConfigError if peft would train a copy of one of two tied tables: servers have one for both."""
    tables = [name for name in trained_whole if name.rpartition(".")[2] in (_INPUT_LAYER, _OUTPUT_LAYER)]
    if tables and _is_tied(model):
        rule = "the model ties its tables of input and output, and a copy of one would untie the learner's alone"
        way_out = "train the rows of coordinates (tuner.train_coord_rows: true), or everything (train_type: full)"
        raise refused("tuner.modules_to_save", tables, rule, way_out)


def _adapted_modules(model: nn.Module, frozen: set[str], wanted: Callable[[str], bool]) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name != _OUTPUT_LAYER
        and part_of(f"{name}.weight") not in frozen
        and wanted(name)
    ]


def _require_known(model: nn.Module, ends: Sequence[str]) -> None:
    """Raise ConfigError for a name that no linear layer has: it would silently train nothing."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if _OUTPUT_LAYER in ends:
        rule = "the output layer gets no adapter"
        way_out = f"take it out; tuner.modules_to_save: [{_OUTPUT_LAYER}] or train_coord_rows: true trains it"
        raise refused("tuner.target_modules", [_OUTPUT_LAYER], rule, way_out)
    unknown = [end for end in ends if not any(map(_by_name([end]), layers))]
    if unknown:
        rule = "no linear layer has such a name; the experts of a mixture are no linear layers"
        way_out = "take it out; tuner.modules_to_save: [experts], or tuner.train_type: full, trains experts"
        raise refused("tuner.target_modules", unknown, rule, way_out)


def _by_name(ends: Sequence[str]) -> Callable[[str], bool]:
    if "all-linear" in ends:
        return lambda name: True
    return lambda name: f".{name}".endswith(tuple(f".{end}" for end in ends))


def _by_regex(regex: str) -> Callable[[str], bool]:
    try:
        pattern = re.compile(regex)
    except re.error as error:
        rule = f"must be a regular expression ({error})"
        raise refused("tuner.target_regex", regex, rule, "correct it, or use target_modules") from error
    return lambda name: pattern.fullmatch(name) is not None


def _check_directory(path: Path | str) -> None:
    if not (Path(path) / "config.json").is_file():
        rule = "must be the folder of a model, with config.json"
        raise refused("model.model", str(path), rule, "give one that stage2 prepare or stage2 export has written")
    if flaw := flaw_of_model(Path(path)):
        raise refused("model.model", str(path), flaw, "copy or download the model again")


def weights_dtype(config: RunConfig) -> torch.dtype | None:
    """Return the dtype in which weights are loaded; None for the checkpoint's own."""
    return _DTYPES[config.model.torch_dtype]


def frozen_parts(config: RunConfig) -> list[str]:
    """Return the parts of the model that do not train."""
    tuner = config.tuner
    flags = {LLM: tuner.freeze_llm, VIT: tuner.freeze_vit, ALIGNER: tuner.freeze_aligner}
    return [part for part, frozen in flags.items() if frozen]


def adapter_options(config: RunConfig) -> dict[str, Any]:
    """Return the fields of peft's LoraConfig.

    Without dropout in a GRPO run: its servers answer without, and the ratio of log-probabilities would show the masks.
    """
    tuner = config.tuner
    return {
        "r": tuner.lora_rank,
        "lora_alpha": tuner.lora_alpha,
        "lora_dropout": 0.0 if config.rlhf is not None else tuner.lora_dropout,
        "bias": tuner.lora_bias,
        "use_dora": tuner.use_dora,
        "target_modules": tuner.target_modules,
        "modules_to_save": tuner.modules_to_save or None,
    }


def _require_wide_weights(model: Any, config: RunConfig) -> None:
    """Raise ConfigError if 16-bit weights would train; DeepSpeed keeps its own copies in float32."""
    if config.uses_deepspeed:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in HALF_FORMATS:
            rule = f"{name} would train in {str(parameter.dtype).removeprefix('torch.')}: {NARROW_WEIGHTS}"
            raise refused("model.torch_dtype", config.model.torch_dtype, rule, WIDEN_WEIGHTS)
