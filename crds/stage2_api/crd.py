"""The CustomResourceDefinition of RolloutMatchingJob, made from the models; `crds/rolloutmatchingjob.yaml` holds it."""

from __future__ import annotations

from typing import Any, Final

from stage2_api import job
from stage2_api.job_status import JobStatus
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

FROZEN: Final = ("rollout", "learner", "config", "volumes", "placement", "gpuResource", "image")
"""Keys of the spec that stay as they are while the job is not suspended: its pods were made from them."""


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
    spec = structural(job.JobSpec)
    config = spec["properties"]["config"]
    config["x-kubernetes-validations"] = cel.validations(RunConfig, RUN_RULES)
    spec["x-kubernetes-validations"] = [*cel.validations(job.JobSpec, JOB_RULES), *_immutable()]
    return {
        "type": "object",
        "description": _sentence(job.RolloutMatchingJob),
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
    """Return the transition rules: what pods are made from stays while there are any, and who works on a job always."""
    way_out = "delete the job and apply it again"
    while_running = [
        {
            "rule": f"oldSelf.?suspend.orValue(false) || ({_same(key)})",
            "message": f"cannot change while the job is not suspended; {way_out}, or set spec.suspend to true first",
            "fieldPath": f".{key}",
        }
        for key in FROZEN
    ]
    return [
        *while_running,
        {"rule": _same("managedBy"), "message": f"can never change; {way_out}", "fieldPath": ".managedBy"},
    ]


def _same(key: str) -> str:
    return f"has(self.{key}) == has(oldSelf.{key}) && (!has(self.{key}) || self.{key} == oldSelf.{key})"


def _sentence(model: type[KubernetesObject]) -> str:
    return " ".join((model.__doc__ or "").split())
