"""`stage2 render`: the objects that the controller would create, as static YAML for GitOps or for reading.

Or the job itself, with all that a cluster needs of the files beside it. Or, in place of the JobSet, a TrainJob of
Kubeflow Trainer that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stage2_api.errors import refused
from stage2_api.job import ObjectMeta
from stage2_api.parsing import merged, parse_job
from stage2_api.validation.validate import validate
from stage2_cli.config_files import OF_JOBSET, WATCHED, load_job, read_job, set_fields
from stage2_controller.children.build import static_children
from stage2_controller.job import names

TRAINER = "trainer.kubeflow.org/v1alpha1"
_OF_QUEUE = (names.LABEL_QUEUE, names.LABEL_PRIORITY)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes text of several lines as a block, so that code stays readable."""


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


def render_job(file: Path, *, namespace: str | None, changes: Sequence[str] = (), trainjob: bool = False) -> str:
    """Return the YAML documents of a job's objects in the order of creation.

    trainjob: a TrainJob and its runtime are in place of the JobSet.

    Raises ConfigError if the file, or the namespace, breaks a rule.
    """
    job = load_job(file, changes)
    if namespace is not None:
        validate(ObjectMeta, {"name": job.metadata.name, "namespace": namespace}, (), root="metadata")
    runs_as_jobset = job.spec.engine == names.JOBSET
    if trainjob and not runs_as_jobset:
        rule, way_out = "must be JobSet for --trainjob", "set it to JobSet: a TrainJob makes one"
        raise refused("spec.engine", job.spec.engine, rule, way_out)
    objects = static_children(job, namespace=namespace)
    if trainjob:
        objects = [made for one in objects for made in (as_trainjob(one) if one["kind"] == names.JOBSET else [one])]
    children = _yaml(objects)
    ignored = [field for field in set_fields(job, WATCHED) if not (runs_as_jobset and field in OF_JOBSET)]
    note = f"# Not applied, because no controller watches these objects: {', '.join(ignored)}\n" if ignored else ""
    return note + children


def as_trainjob(jobset: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the TrainJob that makes this JobSet, after its runtime.

    The JobSet gets the name of the TrainJob; addresses and certificates of servers have it. Kueue admits the TrainJob,
    so only that has the labels of a queue.
    """
    metadata, spec = jobset["metadata"], dict(jobset["spec"])
    suspend = spec.pop("suspend", False)
    labels = {key: value for key, value in metadata["labels"].items() if key not in _OF_QUEUE}
    template = {"metadata": {"labels": labels, "annotations": metadata["annotations"]}, "spec": spec}
    reference = {"kind": "TrainingRuntime", "name": metadata["name"]}
    return [
        {
            "apiVersion": TRAINER,
            "kind": "TrainingRuntime",
            "metadata": {**metadata, "labels": labels},
            "spec": {"template": template},
        },
        {
            "apiVersion": TRAINER,
            "kind": "TrainJob",
            "metadata": metadata,
            "spec": {"runtimeRef": reference, **({"suspend": True} if suspend else {})},
        },
    ]
