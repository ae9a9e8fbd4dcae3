"""The memory of the host: what this process may still take of it, and the part that is a folder of files."""

from __future__ import annotations

import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def shared_memory_left() -> int:
    """Return the bytes that files in shared memory may still take; 0 where there is none."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


def memory_left(meminfo: Path = _MEMORY, group: Path = _GROUP) -> int:
    """Return the bytes that /proc/meminfo has as available, or the fewer that the container's cgroup (v2) leaves."""
    lines = meminfo.read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, taken = group / "memory.max", group / "memory.current"
    if not (limit.is_file() and taken.is_file()) or not (most := limit.read_text().strip()).isdecimal():
        return free
    return max(0, min(free, int(most) - int(taken.read_text())))
