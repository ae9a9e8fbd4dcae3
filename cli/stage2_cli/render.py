"""`stage2 render`: the children that the controller would create, as static YAML for GitOps or for reading."""

from __future__ import annotations

from pathlib import Path

import yaml

from stage2_cli.files import load_job
from stage2_controller.plan import static_children


def render_job(file: Path, *, namespace: str | None) -> str:
    """YAML documents of all children of the job in `file`, in the order in which they are to be applied."""
    children = static_children(load_job(file), namespace=namespace)
    return yaml.safe_dump_all(children, sort_keys=False, allow_unicode=True)
