"""The files of a model folder, without reading its tensors: where they lie, and a fingerprint of what they hold."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

SAMPLES = 16
SAMPLE_BYTES = 2**16


def model_path(model: str) -> Path:
    """Return the folder of a model: a path, or the name on a hub of one that is in the cache. Raises OSError."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as error:  # not in the cache, or no name that a hub could have
        raise FileNotFoundError(f"{model} is no folder here, and no model in the cache") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, by name."""
    return sorted(folder.glob("*.safetensors"))


def model_fingerprint(model: str) -> str:
    """Return a digest of a model: its config.json, and of each file of weights the size, header, and a few samples.

    Of 16 GB it reads a few megabytes. Training changes every tensor that it trains nearly everywhere, so another model
    of the same shapes is told by its samples; one that differs in a few numbers only may not be.

    Raises:
        OSError: there is no such folder, here or in the cache.
    """
    folder = model_path(model)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            header = opened.read(8)
            (length,) = struct.unpack("<Q", header.ljust(8, b"\0"))
            digest.update(opened.read(min(length, size)))
            begin = 8 + min(length, size)
            for number in range(SAMPLES):
                opened.seek(begin + (size - begin) * number // SAMPLES, os.SEEK_SET)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
