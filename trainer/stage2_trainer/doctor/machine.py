"""What a machine has: GPUs that this process may use, memory of the host, shared memory, room on a disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stage2_trainer.serve.cuda_driver import loaded_driver, visible_names

SHARED_MEMORY = Path("/dev/shm")
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def shared_memory_left() -> int:
    """Return the free bytes of shared memory; 0 where there is none."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


def memory_left(meminfo: Path = _MEMORY, group: Path = _GROUP) -> int:
    """Return the bytes that /proc/meminfo calls available, or fewer where the container's cgroup (v2) limits them."""
    lines = meminfo.read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = group / "memory.max", group / "memory.current"
    if not (limit.is_file() and used.is_file()) or not (most := limit.read_text().strip()).isdecimal():
        return free
    return max(0, min(free, int(most) - int(used.read_text())))


QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
MIB = 2**20
MIG = "MIG-"  # how the names of parts of a GPU begin


@dataclass(frozen=True)
class Gpu:
    """A GPU, as its driver describes it; memory in bytes, 0 where the driver tells none (shared with the CPU, MIG)."""

    index: str
    uuid: str
    name: str
    total: int
    used: int


@dataclass(frozen=True)
class Machine:
    """What a machine has; sizes in bytes.

    gpus: those that CUDA_VISIBLE_DEVICES leaves. memory: of the host, that this process may still take. driver: version
    of the loaded NVIDIA driver, None without one.
    """

    gpus: tuple[Gpu, ...]
    shared_memory: int
    memory: int
    driver: str | None = None

    @property
    def smallest_gpu(self) -> int | None:
        """Bytes of the smallest GPU; None where there is none, or none tells."""
        return min((gpu.total for gpu in self.gpus if gpu.total), default=None)

    @classmethod
    def this(cls, environment: Mapping[str, str] = os.environ) -> Machine:
        """Return the machine, or the container, in which this process runs."""
        return cls(
            gpus=visible(gpus_of(_asked_driver()), visible_names(environment)),
            shared_memory=shared_memory_left(),
            memory=memory_left(),
            driver=loaded_driver(),
        )


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) * MIB if mebibytes.isdecimal() else 0


def gpus_of(answer: str) -> list[Gpu]:
    """Return the GPUs of an answer of `nvidia-smi` to `QUERY`; none of an empty one."""
    found = []
    for line in filter(None, answer.splitlines()):
        index, uuid, name, total, used = (part.strip() for part in line.split(","))
        found.append(Gpu(index, uuid, name, _bytes(total), _bytes(used)))
    return found


def visible(gpus: list[Gpu], named: list[str] | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order; CUDA ends at the first name that it does not know.

    named: the variable's names; None where it is not set, and all are visible. A part of a GPU (MIG) counts as one
    whose memory nobody tells; which parts there are is not asked.
    """
    if named is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for name in named:
        gpu = next((gpu for gpu in gpus if name == gpu.index or gpu.uuid.startswith(name)), None)
        if gpu is None and gpus and name.startswith(MIG):
            gpu = Gpu(name, name, "MIG device", total=0, used=0)
        if gpu is None:
            break
        found.append(gpu)
    return tuple(found)


def room_at(path: Path) -> int:
    """Return the free bytes of the disk on which a folder is, or will be made. Raises OSError."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _asked_driver() -> str:
    try:
        return subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""  # no driver here, so no GPU
