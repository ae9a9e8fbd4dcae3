"""An API server for the chart's `lookup`: its objects can be read and listed, and nothing can be written."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests import http_server

Object = dict[str, Any]
# By group and version: kinds with their plurals. What the chart makes must be known too: helm looks for it.
KINDS = {
    "api/v1": {"Namespace": "namespaces", "ServiceAccount": "serviceaccounts"},
    "apis/apps/v1": {"Deployment": "deployments"},
    "apis/policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "apis/networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "apis/apiextensions.k8s.io/v1": {"CustomResourceDefinition": "customresourcedefinitions"},
    "apis/rbac.authorization.k8s.io/v1": {
        "ClusterRole": "clusterroles",
        "ClusterRoleBinding": "clusterrolebindings",
        "Role": "roles",
        "RoleBinding": "rolebindings",
    },
    "apis/admissionregistration.k8s.io/v1": {
        "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
        "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
    },
}
OF_THE_CLUSTER = ("Namespace", "CustomResourceDefinition", "Cluster", "ValidatingAdmissionPolicy")  # kinds begin so


def namespace(name: str) -> Object:
    """Return a namespace."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def definition(release: str, namespace: str) -> Object:
    """Return the CustomResourceDefinition as the release has left it."""
    annotations = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace}
    metadata = {
        "name": "rolloutmatchingjobs.stage2.dev",
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": annotations,
    }
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": metadata}


@contextmanager
def serving(*objects: Object) -> Iterator[str]:
    """Hand out the address at which the objects are served."""

    class Handler(http_server.QuietHandler):
        def do_GET(self) -> None:
            body = _answer(self.path.partition("?")[0].strip("/"), objects)
            sent = json.dumps(
                body or {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            ).encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

    with http_server.serving(Handler) as server:
        yield server.url


def _answer(path: str, objects: tuple[Object, ...]) -> Object | None:
    if path == "version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "apis":
        versions = [key.split("/")[1:] for key in KINDS if key.startswith("apis/")]
        groups = [{"name": group, "versions": [{"groupVersion": f"{group}/{one}", "version": one}]}
                  for group, one in versions]  # fmt: skip
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    for root, kinds in KINDS.items():
        if path == root:
            return {"kind": "APIResourceList", "groupVersion": root.partition("/")[2], "resources": _resources(kinds)}
        for kind, plural in kinds.items():
            here = [one for one in objects if one["kind"] == kind]
            for one in here:
                if path == f"{_folder(root, plural, one)}/{one['metadata']['name']}":
                    return one
            if path.startswith(root) and path.endswith(f"/{plural}"):
                listed = [one for one in here if path in (f"{root}/{plural}", _folder(root, plural, one))]
                return {"kind": f"{kind}List", "apiVersion": root.partition("/")[2], "items": listed}
    return None


def _resources(kinds: dict[str, str]) -> list[Object]:
    return [
        {"name": plural, "kind": kind, "namespaced": not kind.startswith(OF_THE_CLUSTER), "verbs": ["get"]}
        for kind, plural in kinds.items()
    ]


def _folder(root: str, plural: str, one: Object) -> str:
    home = one["metadata"].get("namespace")
    return f"{root}/namespaces/{home}/{plural}" if home else f"{root}/{plural}"
