"""A checkpoint as an export reads it: its kind, its base model, and its merged weights as a stream.

The stream suits a machine that cannot hold the model: base tensors are read from the memory-mapped folder one at a
time, and the merge is the one that servers are sent (`sync.tensors.merge`).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from stage2_api.errors import ConfigError, Problem
from stage2_api.pod.report import EVENT
from stage2_trainer.data.model_files import fetched_model, model_fingerprint, model_path, require_plain, weight_files
from stage2_trainer.process.checkpoints import COURSE, STATE, best_whole, flaw_of, list_checkpoints
from stage2_trainer.process.policy import part_of
from stage2_trainer.process.transformers_compat import layout_fault, turned_experts
from stage2_trainer.sync.tensors.merge import SAVED_COPY, WeightEntry, WeightSource, merged_weights
from stage2_trainer.sync.tensors.model_folder import ModelFolder
from stage2_trainer.sync.transports.protocol import TensorMeta
from stage2_trainer.telemetry.run_log import STEP_LOG

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_NAME = "base_model_name_or_path"
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")


@dataclass(frozen=True)
class TrainedCheckpoint:
    """A whole checkpoint.

    base: folder of the model that training began with. base_name: how the run, or a person, names it.
    adapter: the content of adapter_config.json; None where the model was trained in full.
    course: what the run was made of, by configuration path. state: what transformers' trainer wrote of its progress.
    """

    folder: Path
    base: Path
    base_name: str
    adapter: Mapping[str, Any] | None
    course: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def values(self) -> Path:
        """The folder of the tensors that adapters are merged into, or that are exported as they are."""
        return self.folder if self.adapter is None else self.base

    @property
    def processor(self) -> Path:
        """The folder of tokenizer, image processor and chat template, the run's own where it has them."""
        return self.folder if (self.folder / "tokenizer_config.json").is_file() else self.base


def open_checkpoint(folder: Path, *, model: str | None = None) -> TrainedCheckpoint:
    """Return a checkpoint, of a run's folder the best. model: its base model, a folder or a name in the cache.

    Raises ConfigError if it is no whole checkpoint, or its base model is not here, or is another one.
    """
    if not (folder / STATE).is_file():
        folder = best_whole(folder) or folder
    _require_whole(folder)
    has_adapter = (folder / ADAPTER_CONFIG).is_file()
    adapter = _json(folder / ADAPTER_CONFIG) if has_adapter else None
    if not (folder / ADAPTER_WEIGHTS).is_file() if has_adapter else not weight_files(folder):
        rule = f"must hold {ADAPTER_WEIGHTS if has_adapter else 'safetensors files'}: it has no weights to export"
        raise _refused("CHECKPOINT", folder, rule, "give a checkpoint that was saved with its weights")
    course = _json(folder / COURSE) if (folder / COURSE).is_file() else {}
    require_plain(folder, path="CHECKPOINT", value=str(folder))
    name, base = _base(folder, adapter, model)
    require_plain(base, path="--model", value=name)
    _require_same_base(course, name, base, folder)
    return TrainedCheckpoint(folder, base, name, adapter, course, _json(folder / STATE))


def _require_whole(folder: Path) -> None:
    if not folder.is_dir():
        raise _refused("CHECKPOINT", folder, "must be the folder of a checkpoint", "correct the path")
    if not (folder / STATE).is_file() and list_checkpoints(folder):
        raise _refused("CHECKPOINT", folder, "is a run's folder without a complete checkpoint", "continue training")
    if flaw := flaw_of(folder):
        rule = f"must be a whole checkpoint ({flaw})"
        raise _refused("CHECKPOINT", folder, rule, "give another one: those that a run has named are whole")


def _base(folder: Path, adapter: Mapping[str, Any] | None, model: str | None) -> tuple[str, Path]:
    """Return the name and the folder of the base model; of the recorded names, the first that exists here.

    Only one that a person names is fetched from a hub.
    """
    named = [model] if model else list(_base_names(folder, adapter))
    for name in named:
        for found in (_fetch_base(name),) if model else (_local_folder(name), _local_folder(_hub_name(name))):
            if found is not None and (found / "config.json").is_file():
                return _hub_name(name), found
    rule = "must be the folder of the checkpoint's base model, or its name on a hub"
    names = ", ".join(map(_hub_name, named))
    raise _refused("--model", names or None, rule, "name its folder: --model DIR, or --model NAME to download it")


def _local_folder(name: str) -> Path | None:
    try:
        return model_path(name)
    except OSError:
        return None


def _fetch_base(name: str) -> Path:
    try:
        return fetched_model(name)
    except ConfigError as error:
        raise ConfigError([replace(problem, path="--model") for problem in error.problems]) from error


def _hub_name(name: str) -> str:
    """Return the name on a hub of a folder in its cache; any other name as it is.

    >>> _hub_name("/cache/models--Qwen--Qwen3-VL-2B-Instruct/snapshots/0f3c")
    'Qwen/Qwen3-VL-2B-Instruct'
    """
    found = CACHED.search(name)
    return f"{found[1]}/{found[2]}" if found else name


def _base_names(folder: Path, adapter: Mapping[str, Any] | None) -> Iterator[str]:
    if adapter and adapter.get(BASE_NAME):
        yield adapter[BASE_NAME]
    log = folder.parent / STEP_LOG
    if log.is_file():
        with log.open(encoding="utf-8") as lines:
            yield from (json.loads(line)["model"] for line in lines if line.startswith(f'{{"event": "{EVENT}"'))


def _require_same_base(course: Mapping[str, Any], name: str, base: Path, folder: Path) -> None:
    """Raise ConfigError where the run began with another model than this base."""
    trained_on = course.get("model.model")
    if trained_on is not None and trained_on != f"sha256 {model_fingerprint(str(base))}":
        rule = f"must be the model that the run of {folder} began with, and holds other weights"
        raise _refused("--model", name, rule, "name the folder of that one: --model DIR")


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _refused(path: str, value: object, rule: str, way_out: str) -> ConfigError:
    return ConfigError([Problem(path, None if value is None else str(value), rule, way_out)])


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
            raise ConfigError([Problem("CHECKPOINT", str(checkpoint.folder), fault, "take another model")])
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
        raise ConfigError([Problem("--dtype", kind, rule, "choose another dtype, or an earlier checkpoint")])
    return tensor


def _misfit(checkpoint: TrainedCheckpoint, why: str) -> ConfigError:
    rule = f"must fit its base model {checkpoint.base_name} ({why})"
    way_out = "name the folder of the model that it was trained on: --model DIR"
    return ConfigError([Problem("CHECKPOINT", str(checkpoint.folder), rule, way_out)])
