"""Renders the chart with the real helm and hands the manifests out as dictionaries."""

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[3] / "charts" / "stage2"
REPOSITORY = "registry.example/team"
Manifests = dict[tuple[str, str], dict[str, Any]]
Template = Callable[..., Manifests]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the CRD is long, and libyaml eight times as fast


@pytest.fixture(scope="session")
def template(helm: str) -> Template:
    """`template("controller.logLevel=debug")`: the manifests by (kind, name). server: `lookup` asks it."""

    def run(*values: str, release: str = "stage2", namespace: str = "stage2-system", server: str = "") -> Manifests:
        chosen = [f'image.repository="{REPOSITORY}"', *values]
        arguments = [part for value in chosen for part in ("--set-json", value)]
        whole = [helm, "template", release, str(CHART), "--namespace", namespace, *arguments]
        if server:  # never cached, because it may answer differently the next time
            dry_run = ["--dry-run=server", "--disable-openapi-validation", f"--kube-apiserver={server}"]
            text = _rendered(*whole, *dry_run)
        else:
            text = rendered(*whole)
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document]
        return {(document["kind"], document["metadata"]["name"]): document for document in documents}

    rendered = functools.cache(_rendered)
    return run


def _rendered(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout
