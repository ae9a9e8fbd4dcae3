"""The folder in which a server keeps the adapter that it was sent, read by vLLM's own adapter loader.

Each of the server's workers receives the adapter over the wire and writes it down on its own machine, so no disk is
shared. Only the newest is kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FOLDER_VARIABLE = "STAGE2_ADAPTER_FOLDER"
_NAME = re.compile(r"[a-z]+-\d+-[0-9a-f]+")


def default_folder(port: int) -> str:
    """Return the folder of the server on this port."""
    return str(Path(tempfile.gettempdir()) / f"stage2-adapters-{os.getuid()}-{port}")


def adapter_path(name: str) -> Path | None:
    """Return the folder of an adapter of this server; None if `name` cannot be one."""
    return Path(os.environ[FOLDER_VARIABLE]) / name if _NAME.fullmatch(name) else None


def keep_adapter(name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter in the format of PEFT's checkpoints, and remove older ones.

    Several workers may write the same adapter at once: each writes to a place of its own, and the files appear whole.

    Raises:
        ValueError: the name cannot be an adapter's.
        PermissionError: the folder is a link, or somebody else has made it.
    """
    from safetensors.torch import save_file

    path = adapter_path(name)
    if path is None:
        raise ValueError(f"{name!r} is no name of an adapter")
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _require_own_folder(path.parent)
    for other in path.parent.iterdir():
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
    path.mkdir(exist_ok=True)
    _require_own_folder(path)
    draft = path / f".{os.getpid()}.safetensors"
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, draft)
    draft.replace(path / "adapter_model.safetensors")
    draft = path / f".{os.getpid()}.json"
    draft.write_text(json.dumps(config), encoding="utf-8")
    draft.replace(path / "adapter_config.json")


def _require_own_folder(path: Path) -> None:
    """Raise PermissionError for a folder that is a link, or belongs to somebody else."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} is a link, or belongs to somebody else")
