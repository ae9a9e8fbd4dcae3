"""The tensors of a model folder, read one by one from memory-mapped safetensors files, and their digests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from stage2_trainer.data.model_files import model_path, weight_files
from stage2_trainer.sync.tensors.digest import Digests

INDEX = "model.safetensors.index.json"


class ModelFolder:
    """A model folder. model: its path, or the name on a hub of a model that is in the cache."""

    def __init__(self, model: str) -> None:
        self._path = model_path(model)
        self._files = _files_of_tensors(self._path)
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU, as the file has it. Raises KeyError for a name that is in no file."""
        file = self._files[name]
        if file not in self._open:
            from safetensors import safe_open

            self._open[file] = safe_open(self._path / file, framework="pt")
        found: Tensor = self._open[file].get_tensor(name)
        return found


def folder_digests(model: str, tensors: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the digests of tensors of a folder, each cast to the dtype beside its name; missing tensors are left out.

    Raises OSError where the folder has no safetensors files.
    """
    import torch

    folder, digests = ModelFolder(model), Digests()
    for name, dtype in tensors:
        if name in folder:
            digests.add(name, folder.tensor(name).to(getattr(torch, dtype)))
    return digests.by_tensor()


def _files_of_tensors(folder: Path) -> dict[str, str]:
    if (folder / INDEX).is_file():
        index: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return index
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file.name)
    if not found:
        raise FileNotFoundError(f"{folder} has no safetensors files")
    return found
