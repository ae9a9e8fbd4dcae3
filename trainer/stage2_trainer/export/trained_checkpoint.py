"""The merged weights of a checkpoint, as a stream.

The stream suits a machine that cannot hold the model: base tensors are read from the memory-mapped folder one at a
time, and the merge is the one that servers are sent (`sync.tensors.merge`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from stage2_api.errors import ConfigError, refused
from stage2_trainer.export.checkpoint_folder import TrainedCheckpoint
from stage2_trainer.model.policy import part_of
from stage2_trainer.model.transformers_compat import layout_fault, turned_experts
from stage2_trainer.sync.tensors.announcement import TensorMeta
from stage2_trainer.sync.tensors.merge import SAVED_COPY, WeightEntry, WeightSource, merged_weights
from stage2_trainer.sync.tensors.model_folder import ModelFolder

TABLE, HEAD = "model.language_model.embed_tokens", "lm_head"
HEAD_WEIGHT, TABLE_WEIGHT = f"{HEAD}.weight", f"{TABLE}.weight"


class MergedStream:
    """A re-iterable stream of `(name, tensor)` in the layout of stock checkpoints, merged in float32 and cast once.

    dtype: of all tensors; None = each one's own in the base model. untied: whether the base model's output head is
    its embedding table, and this model's is not, since one of them was trained without the other.
    """

    def __init__(self, checkpoint: TrainedCheckpoint, *, dtype: torch.dtype | None = None) -> None:
        self._values, self._base = ModelFolder(str(checkpoint.values)), ModelFolder(str(checkpoint.base))
        self._dtype = dtype
        model = skeleton(checkpoint)
        if fault := layout_fault(_without_adapter(model)):
            raise refused("CHECKPOINT", str(checkpoint.folder), fault, "take another model")
        self._source = _weight_source(model, checkpoint)
        tied = bool(_without_adapter(model).config.tie_word_embeddings)
        self.untied = tied and HEAD_WEIGHT in self._source.names()
        self._require_all(checkpoint)

    def metadata(self) -> list[TensorMeta]:
        """Return names, dtypes and shapes, in the order of iteration."""
        return [
            TensorMeta(e.name, self._cast_to(e.name), tuple(turned_experts(e.name, e.parameter).shape))
            for e in self._source.entries
        ]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for entry in self._source.entries:
            parameter = self._read(entry) if is_empty(entry.parameter) else entry.parameter.detach()
            alone = replace(self._source, entries=(replace(entry, parameter=parameter.float()),))
            for name, merged in alone:
                yield name, _require_finite(name, turned_experts(name, merged.to(self._cast_to(name))))

    def _read(self, entry: WeightEntry) -> Tensor:
        """Return a tensor of the folder as transformers holds it; a full checkpoint has its experts so, a base not."""
        name = entry.name
        tensor = self._values.tensor(name if name in self._values or name != HEAD_WEIGHT else TABLE_WEIGHT)
        return tensor if tensor.shape == entry.parameter.shape else turned_experts(name, tensor)

    def _cast_to(self, name: str) -> torch.dtype:
        return self._dtype or self._base.tensor(name if name in self._base else TABLE_WEIGHT).dtype

    def _require_all(self, checkpoint: TrainedCheckpoint) -> None:
        """Raise ConfigError where base model and checkpoint do not fit each other."""
        for entry in self._source.entries:
            if entry.name not in self._base and entry.name != HEAD_WEIGHT:
                raise _misfit(checkpoint, f"the base model lacks {entry.name}")
            if not is_empty(entry.parameter):
                continue
            found, wanted = tuple(self._read(entry).shape), tuple(entry.parameter.shape)
            if found != wanted:
                raise _misfit(checkpoint, f"{entry.name} has shape {found}, and {wanted} is expected")


def skeleton(checkpoint: TrainedCheckpoint) -> Any:
    """Return the model as it was trained, its base weights without memory.

    Raises ConfigError if the base model is no Qwen3-VL, or the adapter is none of it.
    """
    config = AutoConfig.from_pretrained(checkpoint.base, local_files_only=True, trust_remote_code=False)
    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise _misfit(checkpoint, f"the base model is no Qwen3-VL: {error}") from error
    if stranger := next((name for name, _ in model.named_parameters() if part_of(name) is None), None):
        raise _misfit(checkpoint, f"the base model is no Qwen3-VL: it has the unknown parameter {stranger}")
    _replace_meta_parameters(model)
    return model if checkpoint.adapter is None else with_adapter(model, checkpoint, low_cpu_mem_usage=True)


def is_empty(parameter: Tensor) -> bool:
    """Whether a parameter of a skeleton takes no memory: it is one of the base model's, still to be read."""
    return parameter.is_meta or parameter.untyped_storage().nbytes() < parameter.nbytes


def _replace_meta_parameters(model: nn.Module) -> None:
    """Replace parameters on `meta` by one zero each, expanded to the parameter's shape; tied ones stay tied.

    PEFT moves what it loads to device and dtype of the base layer: `meta` would lose it, 16 bits would round it.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                zero = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
                made[id(parameter)] = nn.Parameter(zero, requires_grad=False)
            setattr(module, name, made[id(parameter)])


def with_adapter(model: Any, checkpoint: TrainedCheckpoint, **options: Any) -> PeftModel:
    """Put a checkpoint's adapter on its base model. Raises ConfigError where it is none of that model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied tables, which `_weight_source` handles
        try:
            return PeftModel.from_pretrained(
                model, str(checkpoint.folder), is_trainable=True, torch_device="cpu", **options
            )
        except (RuntimeError, ValueError, KeyError) as error:
            raise _misfit(checkpoint, str(error).strip().splitlines()[0]) from error


def _weight_source(model: Any, checkpoint: TrainedCheckpoint) -> WeightSource:
    try:
        source = merged_weights(model)
    except TypeError as error:
        raise _misfit(checkpoint, str(error)) from error
    unread = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unread:
        raise _misfit(checkpoint, f"the adapter has nothing for {unread[0]}")
    own = _head_of_its_own(model, source)
    return replace(source, entries=(*source.entries, own)) if own else source


def _head_of_its_own(model: Any, source: WeightSource) -> WeightEntry | None:
    """Return the output head if it was tied to the embedding table, of which a copy was trained separately."""
    plain = _without_adapter(model)
    names = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    trained = {owner for owner in (TABLE, HEAD) if any(name.startswith(f"{owner}{SAVED_COPY}") for name in names)}
    if trained != {TABLE} or HEAD_WEIGHT in source.names():
        return None
    return WeightEntry(HEAD_WEIGHT, plain.lm_head.weight, None, trains=False)


def _without_adapter(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _require_finite(name: str, tensor: Tensor) -> Tensor:
    if not bool(tensor.isfinite().all()):
        kind = str(tensor.dtype).removeprefix("torch.")
        rule = f"{name} is not finite in {kind}"
        raise refused("--dtype", kind, rule, "choose another dtype, or an earlier checkpoint")
    return tensor


def _misfit(checkpoint: TrainedCheckpoint, why: str) -> ConfigError:
    rule = f"must fit its base model {checkpoint.base_name} ({why})"
    way_out = "name the folder of the model that it was trained on: --model DIR"
    return refused("CHECKPOINT", str(checkpoint.folder), rule, way_out)
