"""What the tests on a cluster need: `python -m tests.support.prerequisites` says what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GO_VERSION = (1, 24)
MACHINE = "x86_64"
SPACE_BYTES = 16 * 10**9
"""What the tests hold at once beside the caches: the trainer image in a registry, its copy on the way, and scratch."""


def missing() -> list[str]:
    """Return a sentence for each prerequisite that this machine lacks, but for kubectl and helm, which are fetched."""
    if os.environ.get("KUBECONFIG"):
        return []
    instead = "or name a cluster with KUBECONFIG"
    sentences = []
    if os.geteuid() != 0:
        sentences.append(f"The tests boot a Kubernetes node, which needs root: run them as root, {instead}.")
    if not shutil.which("apt-get"):
        sentences.append(f"containerd, buildah and others come as Debian packages: use Debian or Ubuntu, {instead}.")
    if platform.machine() != MACHINE:
        sentences.append(f"helm and kubectl are shipped for {MACHINE} alone: use such a machine, {instead}.")
    version = _go()
    if version is None or version < GO_VERSION:
        least = ".".join(map(str, GO_VERSION))
        sentences.append(f"Go {least} or newer, which builds Kubernetes, is not on PATH: install it, {instead}.")
    folders = dict.fromkeys((Path(tempfile.gettempdir()), _caches()))
    sentences += [sentence for folder in folders if (sentence := _full(folder))]
    return sentences


def _caches() -> Path:
    """Return the folder that has, or will have, what is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _full(folder: Path) -> str | None:
    """Return a sentence if the disk of a folder, which need not exist yet, has too little left."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free >= SPACE_BYTES:
        return None
    return (
        f"{folder} has {free / 1e9:.1f} GB free and the tests need {SPACE_BYTES / 1e9:.0f} GB: free some, as with "
        "`hack/local-cluster/local-cluster cache --prune` or `uv cache prune`, or choose other disks with TMPDIR and "
        "XDG_CACHE_HOME."
    )


def _go() -> tuple[int, ...] | None:
    """Return the version of Go on PATH, or None."""
    if not shutil.which("go"):
        return None
    printed = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", printed)[:2]))


if __name__ == "__main__":
    sys.exit("\n".join(missing()) or os.EX_OK)
