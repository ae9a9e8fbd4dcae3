"""`stage2 render`: the objects that the controller would create, as static YAML for GitOps or for reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from stage2_api.job import ObjectMeta
from stage2_api.validation.validate import validate
from stage2_cli.config_files import OF_JOBSET, WATCHED, load_job, set_fields
from stage2_controller.children.build import static_children


def render_job(file: Path, *, namespace: str | None, changes: Sequence[str] = ()) -> str:
    """Return the YAML documents of a job's objects in the order of creation.

    Raises ConfigError if the file, or the namespace, breaks a rule.
    """
    job = load_job(file, changes)
    if namespace is not None:
        validate(ObjectMeta, {"name": job.metadata.name, "namespace": namespace}, (), root="metadata")
    runs_as_jobset = job.spec.engine == "JobSet"
    objects = static_children(job, namespace=namespace)
    children = yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True)
    if not children.replace("\n", "").isprintable():  # PyYAML escapes bidi marks only with everything else
        children = yaml.safe_dump_all(objects, sort_keys=False)
    ignored = [field for field in set_fields(job, WATCHED) if not (runs_as_jobset and field in OF_JOBSET)]
    note = f"# Not applied, because no controller watches these objects: {', '.join(ignored)}\n" if ignored else ""
    return note + children
