"""The folder of a checkpoint, opened for an export: its kind, and its base model. Nothing heavy is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, refused
from stage2_api.pod.report import EVENT
from stage2_trainer.data.model_files import (
    INTACT,
    fetched_model,
    flaw_of_model,
    model_fingerprint,
    model_path,
    require_plain,
    weight_files,
)
from stage2_trainer.model.checkpoints import COURSE, STATE, best_whole, flaw_of, list_checkpoints
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
        raise refused("CHECKPOINT", str(folder), rule, "give a checkpoint that was saved with its weights")
    course = _json(folder / COURSE) if (folder / COURSE).is_file() else {}
    require_plain(folder, path="CHECKPOINT", value=str(folder))
    name, base = _base(folder, adapter, model)
    require_plain(base, path="--model", value=name)
    if flaw := flaw_of_model(base):
        raise refused("--model", name, flaw, INTACT)
    _require_same_base(course, name, base, folder)
    return TrainedCheckpoint(folder, base, name, adapter, course, _json(folder / STATE))


def _require_whole(folder: Path) -> None:
    if not folder.is_dir():
        raise refused("CHECKPOINT", str(folder), "must be the folder of a checkpoint", "correct the path")
    if not (folder / STATE).is_file() and list_checkpoints(folder):
        raise refused("CHECKPOINT", str(folder), "is a run's folder without a complete checkpoint", "continue training")
    if flaw := flaw_of(folder):
        rule = f"must be a whole checkpoint ({flaw})"
        raise refused("CHECKPOINT", str(folder), rule, "give another one: those that a run has named are whole")


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
    raise refused("--model", names or None, rule, "name its folder: --model DIR, or --model NAME to download it")


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
        raise refused("--model", name, rule, "name the folder of that one: --model DIR")


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
