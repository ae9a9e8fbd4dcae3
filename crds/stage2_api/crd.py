"""The CustomResourceDefinition of RolloutMatchingJob, made from the models; `crds/rolloutmatchingjob.yaml` holds it."""

from __future__ import annotations

from typing import Any, Final

from stage2_api import job
from stage2_api.job_status import JobStatus, Phase
from stage2_api.rules.job import JOB_RULES
from stage2_api.rules.run import RUN_RULES
from stage2_api.runconfig import RunConfig
from stage2_api.section import KubernetesObject
from stage2_api.structural_schema import Schema, structural
from stage2_api.validation import cel

_COLUMNS = (
    ("Phase", "string", ".status.phase", "Stage of the job's life."),
    ("Step", "string", ".status.progress", "Optimizer steps that are done, of all."),
    ("Rollout", "string", ".status.rollout", "Servers that answer, of all."),
    ("Node", "string", ".status.node", "Node on which servers and learner run."),
    ("Queue", "string", r".metadata.labels.kueue\.x-k8s\.io/queue-name", "Kueue queue that the job waits in."),
    ("Reason", "string", '.status.conditions[?(@.type=="Training")].reason', "Why the job does not train."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the job was created."),
)

_APPLY_AGAIN = "delete the job and apply it again"
_FAILED: Phase = "Failed"

FROZEN: Final = ("rollout", "learner", "config", "volumes", "placement", "gpuResource", "image", "tls")
"""Keys of the spec that stay as they are while the job has pods, which were made from them."""


def custom_resource_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition as a mapping, ready to be written as YAML or JSON."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{job.PLURAL}.{job.GROUP}"},
        "spec": {
            "group": job.GROUP,
            "names": {
                "kind": job.KIND,
                "listKind": f"{job.KIND}List",
                "plural": job.PLURAL,
                "singular": job.SINGULAR,
                "shortNames": [job.SHORT_NAME],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": job.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _object_schema()},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text} for name, kind, path, text in _COLUMNS
        ],
    }


def _object_schema() -> Schema:
    spec = structural(job.JobSpec, keeps_unknown=True)
    config = spec["properties"]["config"]
    config["x-kubernetes-validations"] = cel.validations(RunConfig, RUN_RULES)
    spec["x-kubernetes-validations"] = [*cel.validations(job.JobSpec, JOB_RULES), _managed_for_good()]
    return {
        "type": "object",
        "description": _sentence(job.RolloutMatchingJob),
        "x-kubernetes-preserve-unknown-fields": True,
        "x-kubernetes-validations": _immutable(),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of the schema of this object."},
            "kind": {"type": "string", "description": "Kind of this object."},
            "metadata": {"type": "object"},
            "spec": {**spec, "description": "What the job is to do. Required."},
            "status": {**structural(JobStatus), "description": "What the controller observes of the job."},
        },
    }


def _immutable() -> list[dict[str, str]]:
    """Return the transition rules of what pods are made from: it stays while there are any.

    A job that failed has none, and runs again as soon as it is corrected. Only the whole object has its status.
    """
    way_out = f"{_APPLY_AGAIN}, or set spec.suspend to true first"
    no_pods = f"oldSelf.spec.?suspend.orValue(false) || oldSelf.?status.?phase.orValue('') == '{_FAILED}'"
    return [
        {
            "rule": f"{no_pods} || ({_same('.spec', key)})",
            "message": f"cannot change while the job is not suspended; {way_out}",
            "fieldPath": f".spec.{key}",
        }
        for key in FROZEN
    ]


def _managed_for_good() -> dict[str, str]:
    """Return the transition rule of who works on a job."""
    return {
        "rule": _same("", "managedBy"),
        "message": f"can never change; {_APPLY_AGAIN}",
        "fieldPath": ".managedBy",
    }


def _same(parent: str, key: str) -> str:
    new, old = f"self{parent}.{key}", f"oldSelf{parent}.{key}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _sentence(model: type[KubernetesObject]) -> str:
    return " ".join((model.__doc__ or "").split())
