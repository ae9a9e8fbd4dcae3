"""Renders the chart with the real helm and hands the manifests out as dictionaries."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "charts" / "stage2"
Manifests = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def helm() -> str:
    """helm from PATH, else the one that hack/local-cluster built."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stage2" / "cluster" / "bin"
    built = sorted(cache.glob("**/helm"), key=lambda path: path.stat().st_mtime)
    found = shutil.which("helm") or (str(built[-1]) if built else None)
    if found is None:
        pytest.skip("no helm on PATH and none built by `hack/local-cluster/local-cluster up`")
    return found


@pytest.fixture(scope="session")
def template(helm: str) -> Callable[..., Manifests]:
    """`template("controller.logLevel=debug")`: the release's manifests by (kind, name)."""

    def run(*values: str) -> Manifests:
        arguments = [part for value in values for part in ("--set-json", value)]
        done = subprocess.run(
            [helm, "template", "stage2", str(CHART), "--namespace", "stage2-system", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(done.stderr)
        documents = [document for document in yaml.safe_load_all(done.stdout) if document]
        return {(document["kind"], document["metadata"]["name"]): document for document in documents}

    return run
