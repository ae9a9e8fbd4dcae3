"""`stage2 render`: the objects that the controller would create, as static YAML for GitOps or for reading.

Or the job itself, with all that a cluster needs of the files beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stage2_api.job import ObjectMeta
from stage2_api.parsing import merged, parse_job
from stage2_api.validation.validate import validate
from stage2_cli.config_files import OF_JOBSET, WATCHED, load_job, read_job, set_fields
from stage2_controller.children.build import static_children


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are read: code."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def render_itself(file: Path, *, namespace: str | None, changes: Sequence[str] = ()) -> str:
    """Return the YAML of the job with the reward files that are beside it. Raises ConfigError."""
    written, _ = read_job(file, changes)
    document = merged(written, {"metadata": {"namespace": namespace}} if namespace else {})
    parse_job(document)
    return _yaml([document], _Dumper)


def _yaml(documents: Sequence[Mapping[str, Any]], dumper: type[yaml.SafeDumper] = yaml.SafeDumper) -> str:
    text: str = yaml.dump_all(documents, Dumper=dumper, sort_keys=False, allow_unicode=True)
    if not text.replace("\n", "").isprintable():  # PyYAML escapes bidi marks only with everything else
        text = yaml.dump_all(documents, Dumper=dumper, sort_keys=False)
    return text


def render_job(file: Path, *, namespace: str | None, changes: Sequence[str] = ()) -> str:
    """Return the YAML documents of a job's objects in the order of creation.

    Raises ConfigError if the file, or the namespace, breaks a rule.
    """
    job = load_job(file, changes)
    if namespace is not None:
        validate(ObjectMeta, {"name": job.metadata.name, "namespace": namespace}, (), root="metadata")
    runs_as_jobset = job.spec.engine == "JobSet"
    objects = static_children(job, namespace=namespace)
    children = _yaml(objects)
    ignored = [field for field in set_fields(job, WATCHED) if not (runs_as_jobset and field in OF_JOBSET)]
    note = f"# Not applied, because no controller watches these objects: {', '.join(ignored)}\n" if ignored else ""
    return note + children
