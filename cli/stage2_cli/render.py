"""`stage2 render`: the children that the controller would create, as static YAML for GitOps or for reading."""

from __future__ import annotations

from pathlib import Path

import yaml

from stage2_api.job import ObjectMeta
from stage2_api.validation.validate import validate
from stage2_cli.config_files import load_job
from stage2_cli.left_out import WATCHED, left_out
from stage2_controller.children.build import static_children


def render_job(file: Path, *, namespace: str | None) -> str:
    """Return YAML documents of all children of the job in `file`, in the order in which they are to be applied.

    Raises:
        ConfigError: if the file, or the namespace, breaks a rule.
    """
    job = load_job(file)
    if namespace is not None:
        validate(ObjectMeta, {"name": job.metadata.name, "namespace": namespace}, (), root="metadata")
    children = yaml.safe_dump_all(static_children(job, namespace=namespace), sort_keys=False, allow_unicode=True)
    ignored = left_out(job, WATCHED)
    note = f"# Left to you, since no controller watches these objects: {', '.join(ignored)}\n" if ignored else ""
    return note + children
