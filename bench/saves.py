"""A checkpoint on disk: written aside, looked over, flushed and named, against the same bytes written and flushed.

Wall times, the best of several: the disk decides, and others use it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench.tables import Row, Table
from safetensors.torch import save_file

from stage2_trainer.model.checkpoints import PREFIX, create_staging, publish

WEIGHTS_BYTES = 2**30 // 3  # and two moments of an optimizer: a GiB in all
RUNS = 3
BLOCK = 2**24


def rows() -> Iterator[Row]:
    """The whole save, and its parts: what is beside writing, and the flushing."""
    weights, *moments = (torch.randn(WEIGHTS_BYTES // 4) for _ in range(3))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as temporary:
        folder = Path(temporary)

        def write() -> Path:
            staged = create_staging(folder) / f"{PREFIX}1"
            staged.mkdir()
            save_file({"weights": weights}, staged / "model.safetensors")
            torch.save({"moments": moments}, staged / "optimizer.pt")
            return staged

        ours = best(lambda: publish(write(), folder))
        size = sum(file.stat().st_size for file in (folder / f"{PREFIX}1").iterdir())
        shutil.rmtree(folder / f"{PREFIX}1")
        raw = best(lambda: write_raw(folder / "raw", size))
        (folder / "raw").unlink()
        staged = write()
        for file in staged.iterdir():
            flush(file)
        looked_over = best(lambda: publish(staged, folder).rename(staged))
        what = f"a checkpoint of {size / 1e9:.2f} GB, {size / ours / 1e9:.2f} GB/s"
        yield Row(what, f"raw write and flush, {size / raw / 1e9:.2f} GB/s", ours, raw)
        yield Row("looking it over and naming it, once it is on disk", "the whole save", looked_over, ours)


def write_raw(path: Path, size: int) -> None:
    """Write so many bytes, and wait until they are on disk."""
    block = os.urandom(BLOCK)
    with path.open("wb") as file:
        for _ in range(size // BLOCK):
            file.write(block)
    flush(path)


def flush(path: Path) -> None:
    """Wait until a file is on disk."""
    opened = os.open(path, os.O_RDONLY)
    os.fsync(opened)
    os.close(opened)


def best(call: Callable[[], object]) -> float:
    """Return the least wall time of several runs."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


TABLE = Table("A checkpoint on disk", "s", 1.0, rows)
