"""The resources that a run may need, and those that a machine has."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stage2_trainer.process.cuda_driver import loaded_driver

GIB = 2**30
CONTEXT_BYTES = GIB  # of a CUDA process, with its libraries


@dataclass(frozen=True)
class Part:
    """A part of the memory that is needed, in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Footprint:
    """The needs of a run, in bytes.

    learner: of a learner GPU, without CUDA's own. offloaded: of the host, for what leaves that GPU during generation.
    beside_push: of a GPU that a colocated engine shares, without CUDA's own, while the learner's weights are loaded
    into it; beside_answers: of the learner there, while the engine generates.
    server: of one server's GPUs, without its cache. cache_token: of a token in a server's cache. adapted: base weights
    with an adapter, which a server reads at each push to merge it. checkpoint: of one on disk. trained: number of
    trainable parameters.
    """

    learner: tuple[Part, ...]
    offloaded: tuple[Part, ...]
    beside_push: int
    beside_answers: int
    server: tuple[Part, ...]
    cache_token: int
    adapted: int
    checkpoint: int
    trained: int


def total(parts: Iterable[Part]) -> int:
    """Return the sum of parts."""
    return sum(part.nbytes for part in parts)


SHARED_MEMORY = Path("/dev/shm")
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Gpu:
    """A visible GPU, or a part of one (MIG), by its number in this process; memory in bytes."""

    index: int
    name: str
    total: int
    used: int

    @classmethod
    def visible(cls) -> tuple[Gpu, ...]:
        """Return all visible GPUs, as PyTorch counts them; none where PyTorch is not installed."""
        if find_spec("torch") is None:
            return ()
        import torch  # takes seconds

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0  # a driver may be too old for PyTorch
        return tuple(map(cls._numbered, range(count)))

    @classmethod
    def _numbered(cls, index: int) -> Gpu:
        """Return the GPU of this number. Memory that others use is what a context of this process leaves."""
        import torch

        properties = torch.cuda.get_device_properties(index)
        try:
            free, _ = torch.cuda.mem_get_info(index)
        except RuntimeError:  # another process fills it, or has it to itself
            free = 0
        used = max(0, properties.total_memory - free - CONTEXT_BYTES)
        return cls(index, properties.name, properties.total_memory, used)


@dataclass(frozen=True)
class Machine:
    """What a machine has; sizes in bytes.

    gpus: the visible ones. memory: of the host, still free for this process. driver: its version.
    """

    gpus: tuple[Gpu, ...]
    shared_memory: int
    memory: int
    driver: str | None = None

    @property
    def smallest_gpu(self) -> int | None:
        """Bytes of the smallest GPU; None where there is none."""
        return min((gpu.total for gpu in self.gpus), default=None)

    @classmethod
    def detect(cls) -> Machine:
        """Return the machine, or the container, in which this process runs."""
        return cls(
            gpus=Gpu.visible(),
            shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
            memory=memory_left(),
            driver=loaded_driver(),
        )


def room_at(path: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist yet. Raises OSError."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def memory_left(meminfo: Path = _MEMORY, group: Path = _GROUP) -> int:
    """Return the bytes that /proc/meminfo calls available, or fewer where the container's cgroup (v2) limits them."""
    lines = meminfo.read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = group / "memory.max", group / "memory.current"
    if not (limit.is_file() and used.is_file()) or not (most := limit.read_text().strip()).isdecimal():
        return free
    return max(0, min(free, int(most) - int(used.read_text())))
