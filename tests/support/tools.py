"""helm, kubectl, promtool and docker-registry, for tests of every tier, and the cluster of whoever changes one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

HACK = Path(__file__).parents[2] / "hack"
LOCAL_CLUSTER = HACK / "local-cluster" / "local-cluster"


def tool(name: str) -> str:
    """Return the path of one of them: the one on PATH, else the one that hack/local-cluster fetches."""
    return subprocess.run([LOCAL_CLUSTER, "tool", name], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def choose_cluster(folder: Path) -> Path:
    """Say which cluster KUBECONFIG names; return a kubeconfig in `folder` that holds no other one.

    Raises:
        SystemExit: KUBECONFIG names none.
    """
    file = folder / "kubeconfig"
    if code := subprocess.run([HACK / "choose-cluster", file], check=False).returncode:
        raise SystemExit(code)
    return file


@contextmanager
def chosen_cluster() -> Iterator[None]:
    """Let KUBECONFIG lead to that cluster and no other one."""
    named = os.environ.get("KUBECONFIG")
    with TemporaryDirectory() as folder:
        os.environ["KUBECONFIG"] = str(choose_cluster(Path(folder)))
        try:
            yield
        finally:
            os.environ["KUBECONFIG"] = str(named)
