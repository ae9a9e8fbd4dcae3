"""The CustomResourceDefinition of RolloutMatchingJob, generated from the models into `crds/rolloutmatchingjob.yaml`.

Pydantic writes JSON Schema with references, `anyOf` and `const`. A structural schema, as Kubernetes demands, has none
of them (Kubernetes documentation: CustomResourceDefinition, "Specifying a structural schema"). Rules between keys are
written in CEL, which the API server evaluates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from stage2_api import job
from stage2_api.job_status import JobStatus, Phase
from stage2_api.rules.job import JOB_RULES
from stage2_api.rules.run import RUN_RULES
from stage2_api.runconfig import RunConfig
from stage2_api.section import KubernetesObject, Section
from stage2_api.validation import key_paths
from stage2_api.validation.cel import expression
from stage2_api.validation.validate import Rule

_COLUMNS = (
    ("Phase", "string", ".status.phase", "Stage of the job's life."),
    ("Step", "string", ".status.progress", "Optimizer steps done, of all steps."),
    ("Rollout", "string", ".status.rollout", "Ready servers, of all servers."),
    ("Node", "string", ".status.node", "Node of servers and learner."),
    ("Queue", "string", r".metadata.labels.kueue\.x-k8s\.io/queue-name", "Kueue queue of the job."),
    ("Reason", "string", '.status.conditions[?(@.type=="Training")].reason', "Why the job is not training."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the job was created."),
)

_APPLY_AGAIN = "delete the job and apply it again"
_FAILED: Phase = "Failed"

UNOBSERVED: Final = -1
"""`status.observedGeneration` until the controller has seen the job: without one, GitOps tools take it for ready."""
FROZEN: Final = ("rollout", "learner", "config", "volumes", "placement", "gpuResource", "image", "tls")
"""Keys of the spec that cannot change while the job has pods, but for the number of servers in one Job of a JobSet."""
_SCALED = ("rollout", "servers")
FILLED_IN: Final = frozenset(
    {
        *("gpuResource", "imagePullPolicy", "suspend", "rollout", "learner", "placement"),
        *("rollout.servers", "rollout.gpusPerServer", "rollout.port"),
        *("learner.gpus", "learner.backoffLimit", "learner.startDeadlineSeconds"),
        *("volumes[].readOnly", "volumes[].persistentVolumeClaim.readOnly", "volumes[].nfs.readOnly"),
        *("volumes[].configMap.optional", "volumes[].secret.optional"),
    }
)
"""Keys of the spec whose defaults the API server fills in: those of the first definition. No key joins them: what was
filled in stays in the job, and after a rollback an older version refuses what it does not know. All other defaults are
in the models alone, and in the descriptions."""


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
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.rollout.servers",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text} for name, kind, path, text in _COLUMNS
        ],
    }


def _object_schema() -> Schema:
    spec = structural(job.JobSpec, filled_in=FILLED_IN, keeps_unknown=True)
    config = spec["properties"]["config"]
    config["x-kubernetes-validations"] = validations(RunConfig, RUN_RULES)
    spec["x-kubernetes-validations"] = [*validations(job.JobSpec, JOB_RULES), *map(_forever, ("managedBy", "engine"))]
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
            "spec": {**spec, "description": "Specification of the job. Required."},
            "status": {
                **structural(JobStatus),
                "description": "Status of the job, written by the controller.",
                "default": {"observedGeneration": UNOBSERVED},
            },
        },
    }


def _immutable() -> list[dict[str, str]]:
    """Return the transition rules that freeze the inputs of a job's pods while it has pods.

    A job that the same write suspends gets none until it is resumed. A failed job has none, and runs again once it is
    corrected. The rules are on the whole object because they read the
    status.
    """
    way_out = f"{_APPLY_AGAIN}, or set spec.suspend to true with the change"
    suspended = " || ".join(f"{one}.spec.?suspend.orValue(false)" for one in ("self", "oldSelf"))
    no_pods = f"{suspended} || oldSelf.?status.?phase.orValue('') == '{_FAILED}'"
    return [
        {
            "rule": f"{no_pods} || {_scalable() if key == _SCALED[0] else _same('spec', key)}",
            "message": f"cannot change while the job is not suspended; {way_out}",
            "fieldPath": f".spec.{key}",
        }
        for key in FROZEN
    ]


def _scalable() -> str:
    """Return in CEL that no key of the section has changed; with engine JobSet the number of servers may."""
    section, scaled = _SCALED
    same = {key: _same(f"spec.{section}", to_camel(key)) for key in job.RolloutSpec.model_fields}
    elastic = "self.spec.?engine.orValue('') == 'JobSet' && self.spec.?placement.?topology.orValue('') != 'Exclusive'"
    same[scaled] = f"({same[scaled]} || {elastic})"
    return " && ".join(same.values())


def _forever(key: str) -> dict[str, str]:
    """Return the transition rule that a job keeps a key."""
    return {"rule": _same("", key), "message": f"can never change; {_APPLY_AGAIN}", "fieldPath": f".{key}"}


def _same(parent: str, key: str) -> str:
    """Return in CEL that a key below `parent` has not changed; to write out a default changes nothing.

    Sections have their keys compared, but for the training YAML, which stays as written.
    """
    path = f"{parent}.{key}".lstrip(".")
    info = key_paths.field_at(job.RolloutMatchingJob if parent else job.JobSpec, path.split("."))
    assert info is not None
    default = info.get_default()
    if isinstance(default, KubernetesObject):
        return " && ".join(_same(path, to_camel(inner)) for inner in type(default).model_fields)
    new, old = f"self.{path}", f"oldSelf.{path}"
    if isinstance(default, int):
        value = f".?{path.replace('.', '.?')}.orValue({json.dumps(default)})"
        return f"self{value} == oldSelf{value}"
    if isinstance(default, str):  # the API server has no estimate for two texts with `orValue`
        unset = " && ".join(f"(!has({one}) || {one} == '{default}')" for one in (new, old))
        return f"(has({new}) && has({old}) ? {new} == {old} : {unset})"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _sentence(model: type[KubernetesObject]) -> str:
    return " ".join((model.__doc__ or "").split())


Schema = dict[str, Any]

OVERRIDE = "x-stage2-schema"
"""Key of a field's own JSON schema, for types that pydantic cannot express as a structural schema."""

_DROPPED = ("$defs", "title", "additionalProperties", "propertyNames", OVERRIDE)
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def structural(model: type[Section], *, filled_in: frozenset[str] = frozenset(), keeps_unknown: bool = False) -> Schema:
    """Return the structural schema of a model: no references; one-line descriptions that end in the default.

    filled_in: the keys whose defaults become part of the schema. keeps_unknown: the API server stores unknown keys
    instead of dropping them silently for clients that do not request strict validation.
    """
    whole = model.model_json_schema(by_alias=True, mode="validation")
    return _Walk(whole.get("$defs", {}), filled_in, keeps_unknown=keeps_unknown).node(whole, "")


def sections(schema: Schema, path: str, description: str = "") -> Iterator[tuple[str, Schema, str]]:
    """Yield a section and all below it, each with its path (`[]` marks lists) and its description."""
    yield path, schema, description
    for key, value in schema["properties"].items():
        inside = value.get("items", value)
        if "properties" in inside:
            here = key_paths.joined(path, key) + ("[]" if "items" in value else "")
            yield from sections(inside, here, value["description"])


class _Walk:
    """Converts one JSON schema of pydantic."""

    def __init__(self, definitions: Mapping[str, Schema], filled_in: frozenset[str], *, keeps_unknown: bool) -> None:
        self._keeps_unknown = keeps_unknown
        self._definitions = definitions
        self._filled_in = filled_in

    def node(self, raw: Mapping[str, Any], path: str) -> Schema:
        """Return the structural form of the node at a path."""
        raw = self._flat(raw)
        if OVERRIDE in raw:
            kept = {key: raw[key] for key in ("description", "default") if key in raw}
            raw = {**raw[OVERRIDE], **kept}
        first = {key: raw[key] for key in ("type", "description") if key in raw}
        result = {**first, **{key: value for key, value in raw.items() if key not in _DROPPED}}
        for exclusive, bound in _BOUNDS.items():
            if exclusive in result:
                result[bound], result[exclusive] = result[exclusive], True
        if "const" in result:
            result["enum"] = [result.pop("const")]
        if "properties" in result:
            if self._keeps_unknown:
                result["x-kubernetes-preserve-unknown-fields"] = True
            result["properties"] = {
                key: self._property(value, key_paths.joined(path, key), required=key in result.get("required", ()))
                for key, value in result["properties"].items()
            }
        if "items" in result:
            result["items"] = self.node(result["items"], f"{path}[]")
        if isinstance(raw.get("additionalProperties"), Mapping):
            result["additionalProperties"] = self.node(raw["additionalProperties"], f"{path}[]")
        if "description" in result:
            result["description"] = " ".join(result["description"].split())
        return result

    def _property(self, raw: Mapping[str, Any], path: str, *, required: bool) -> Schema:
        result = self.node(raw, path)
        default = result.pop("default", None)
        section = "properties" in result
        if required:
            result["description"] += " Required."
        elif not section and default not in (None, {}, []):
            result["description"] += f" Default: {_text(default)}."
        if path in self._filled_in:
            result["default"] = {} if section else default
        return result

    def _flat(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a node without references and null branches.

        Null means unset in every key, and the API server drops nulls from fields that are not nullable.
        """
        while "$ref" in raw or ("anyOf" in raw and OVERRIDE not in raw):
            if "$ref" in raw:
                raw = {**self._definitions[raw["$ref"].rpartition("/")[2]], **_without(raw, "$ref")}
                continue
            branches = [branch for branch in raw["anyOf"] if branch != {"type": "null"}]
            if len(branches) != 1:
                raise ValueError(f"a structural schema cannot have a choice of types: {raw}")
            raw = {**branches[0], **_without(raw, "anyOf")}
        return raw


def _without(raw: Mapping[str, Any], key: str) -> Schema:
    return {name: value for name, value in raw.items() if name != key}


def _text(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return '""' if default == "" else str(default)


def validations(model: type[BaseModel], rules: Sequence[Rule[Any]]) -> list[dict[str, str]]:
    """Return `x-kubernetes-validations` for the schema of `model`: one entry per rule with CEL."""
    return [
        {"rule": expression(model, rule.cel), "message": f"{rule.rule}; {rule.way_out}", "fieldPath": f".{rule.path}"}
        for rule in rules
        if rule.cel is not None
    ]
