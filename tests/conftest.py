"""What more than one tier of tests stands on."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def helm() -> str:
    """helm from PATH, else the one that hack/local-cluster built."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stage2" / "cluster" / "bin"
    built = sorted(cache.glob("**/helm"), key=lambda path: path.stat().st_mtime)
    found = shutil.which("helm") or (str(built[-1]) if built else None)
    if found is None:
        pytest.skip("no helm on PATH and none built by hack/local-cluster")
    return found
