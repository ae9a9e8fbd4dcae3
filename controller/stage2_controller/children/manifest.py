"""Manifests of a job's children: their common metadata, and the two that only hold data, ConfigMap and Secret."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stage2_api.pod import layout
from stage2_controller.job import kinds, names
from stage2_controller.job.kinds import ChildKind

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Owner:
    """The job that owns the children.

    uid: None in static YAML, which no controller manages: its children have neither an owner reference nor hashes.
    """

    name: str
    namespace: str
    uid: str | None = None


def digest(value: object) -> str:
    """Return sixteen hexadecimal digits, the same for equal JSON values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def selector(job: str, role: str) -> dict[str, str]:
    """Return the labels by which the pods of one role of one job are selected."""
    return {names.LABEL_JOB: names.short_name(job), names.LABEL_ROLE: role}


def labels(job: str, role: str) -> dict[str, str]:
    """Return all labels of a child: the selector's and the recommended ones of Kubernetes."""
    return {
        **selector(job, role),
        "app.kubernetes.io/name": "stage2",
        "app.kubernetes.io/instance": names.short_name(job),
        "app.kubernetes.io/component": role,
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
    }


def child(
    kind: ChildKind,
    owner: Owner,
    body: Mapping[str, Any],
    *,
    annotations: Mapping[str, str] | None = None,
    spec_hash: str | None = None,
) -> Manifest:
    """Return the complete manifest of a child: `body` with its metadata.

    spec_hash: the hash of the part of the spec from which the child is built. The manifest then carries it beside a
    hash of itself; with both a later pass tells an edited spec from another version of the controller.
    """
    metadata: Manifest = {
        "name": names.child_name(owner.name, kind.role),
        "namespace": owner.namespace,
        "labels": labels(owner.name, kind.role),
        "annotations": {names.ANNOTATION_JOB: owner.name, **(annotations or {})},
    }
    if owner.uid:
        metadata["ownerReferences"] = [_owner_reference(owner)]
    manifest = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **body}
    if spec_hash is not None:
        hashes = {names.ANNOTATION_SPEC_HASH: spec_hash, names.ANNOTATION_MANIFEST_HASH: digest(manifest)}
        metadata["annotations"] = {**metadata["annotations"], **hashes}
    return manifest


def configmap(owner: Owner, config_text: str, *, spec_hash: str | None) -> Manifest:
    """Return ConfigMap `<job>-config`: the effective training configuration, which every pod of the job mounts."""
    return child(kinds.CONFIG_MAP, owner, {"data": {layout.CONFIG_KEY: config_text}}, spec_hash=spec_hash)


def secret(owner: Owner, content: Mapping[str, str]) -> Manifest:
    """Return Secret `<job>-token`: the bearer token, which every server route but /health demands, and certificates.

    It is created once and never written again, because running pods hold its content.
    """
    data = {key: base64.b64encode(text.encode()).decode() for key, text in content.items()}
    return child(kinds.SECRET, owner, {"type": "Opaque", "immutable": True, "data": data})


def _owner_reference(owner: Owner) -> Manifest:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
