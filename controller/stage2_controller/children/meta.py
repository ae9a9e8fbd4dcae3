"""The metadata that all children share: names, labels, owner, and the hashes by which a pass knows its own work."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from stage2_controller.spec import names
from stage2_controller.spec.kinds import ChildKind

Manifest = dict[str, Any]


def digest(value: object) -> str:
    """Return sixteen hexadecimal digits that two equal JSON values share."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def selector(job: str, role: str) -> dict[str, str]:
    """Return the labels that tell the pods of one role of one job from all others."""
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


def child(kind: ChildKind, *, owner: Mapping[str, Any], body: Mapping[str, Any]) -> Manifest:
    """Return the manifest of `owner`'s child: `body` with name, labels and owner reference.

    `owner` is the metadata of the job: name, namespace, and uid where the API server has given one.
    """
    metadata: dict[str, Any] = {
        "name": names.child_name(owner["name"], kind.role),
        "namespace": owner["namespace"],
        "labels": labels(owner["name"], kind.role),
        "annotations": {names.ANNOTATION_JOB: owner["name"]},
    }
    if owner.get("uid"):
        metadata["ownerReferences"] = [_owner_reference(owner)]
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **body}


def stamped(manifest: Manifest, spec_hash: str) -> Manifest:
    """Return the manifest with the hash of the spec that it was made from and the hash of itself."""
    annotations = {**manifest["metadata"]["annotations"], names.ANNOTATION_SPEC_HASH: spec_hash}
    annotations[names.ANNOTATION_MANIFEST_HASH] = digest(manifest)
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}


def _owner_reference(owner: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": owner["name"],
        "uid": owner["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
