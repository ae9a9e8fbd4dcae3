"""helm, kubectl, promtool and docker-registry, for tests of every tier."""

import subprocess
from pathlib import Path

LOCAL_CLUSTER = Path(__file__).parents[1] / "hack" / "local-cluster" / "local-cluster"


def tool(name: str) -> str:
    """Return the path of one of them: the one on PATH, else the one that hack/local-cluster fetches."""
    return subprocess.run([LOCAL_CLUSTER, "tool", name], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
