"""The cgroup that holds every pod, on cgroup v1 (one hierarchy per controller) and v2 (one for all)."""

import os
import signal
import time
from pathlib import Path

from local_cluster.layout import ClusterError, Layout

ROOT = Path("/sys/fs/cgroup")


def _hierarchies() -> list[Path]:
    """Roots of the mounted hierarchies, without v1 aliases, which are symlinks to the same directory."""
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return sorted(
        path for path in ROOT.iterdir() if path.is_dir() and not path.is_symlink() and (path / "cgroup.procs").exists()
    )


def create(layout: Layout) -> None:
    """Create the parent cgroup: the kubelet refuses a --cgroup-root that does not exist."""
    if (ROOT / "cgroup.controllers").exists():
        available = (ROOT / "cgroup.controllers").read_text().split()
        (ROOT / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in available))
    for hierarchy in _hierarchies():
        folder = hierarchy / layout.cgroup.lstrip("/")
        folder.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            # A v1 cpuset starts empty and then admits no process.
            if hierarchy.name.startswith("cpuset") and (hierarchy / name).exists():
                (folder / name).write_text((hierarchy / name).read_text())


def remove(layout: Layout, *, timeout_s: float = 10.0) -> None:
    """Kill every process in the cgroup and below, and remove it; its containers end with it."""
    deadline = time.monotonic() + timeout_s
    for hierarchy in _hierarchies():
        folder = hierarchy / layout.cgroup.lstrip("/")
        while folder.exists() and not _remove_once(folder):
            if time.monotonic() > deadline:
                raise ClusterError(f"{folder} still holds processes {sorted(_members(folder))}, which do not die")
            time.sleep(0.05)


def _remove_once(folder: Path) -> bool:
    for pid in _members(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    try:
        for path in _tree(folder):
            path.rmdir()
    except OSError:
        return False  # dying processes leave their cgroup a moment later
    return True


def _members(folder: Path) -> set[int]:
    return {int(pid) for path in _tree(folder) for pid in (path / "cgroup.procs").read_text().split()}


def _tree(folder: Path) -> list[Path]:
    """The folder and its descendants, deepest first."""
    return [Path(root) for root, _, _ in os.walk(folder, topdown=False)]
