"""What the chart finds on the cluster before anything is made, and what it then refuses."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support import http_server
from tests.unit.charts.conftest import CHART, REPOSITORY, Template

Object = dict[str, Any]
Install = Callable[..., str]
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


@pytest.fixture
def install(helm: str) -> Install:
    """`install(server, "--take-ownership")`: what helm complains about, empty where it would make the release."""

    def run(server: str, *arguments: str, release: str = "other", namespace: str = "other-system") -> str:
        asked = [
            f"--set=image.repository={REPOSITORY}",
            "--dry-run=server",
            "--disable-openapi-validation",
            f"--kube-apiserver={server}",
        ]
        command = [helm, "install", release, str(CHART), "--namespace", namespace, *asked, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""

    return run


def controller(template: Template, release: str, namespace: str, *values: str) -> Object:
    """Return the Deployment that the release has made."""
    made = template(*values, release=release, namespace=namespace)
    (deployment,) = (one for (kind, _), one in made.items() if kind == "Deployment")
    owner = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace}
    return {**deployment, "metadata": {**deployment["metadata"], "annotations": owner}}


def test_missing_namespace_is_reported_before_installation(template: Template) -> None:
    with serving(namespace("default"), namespace("team-a")) as server:
        assert template('controller.namespaces=["team-a"]', server=server)
        with pytest.raises(ValueError, match=r"controller\.namespaces: there is no namespace team-b; create it first"):
            template('controller.namespaces=["team-a","team-b"]', server=server)


def test_namespaces_are_not_checked_without_server(template: Template) -> None:
    assert template('controller.namespaces=["team-b"]')


def test_leftover_crd_is_taken_over_by_take_ownership_flag(install: Install) -> None:
    with serving(definition("stage2", "stage2-system")) as server:
        assert install(server, "--take-ownership") == ""
        assert install(server, release="stage2", namespace="stage2-system") == ""
        assert 'must equal "other": current value is "stage2"' in install(server)


def test_crd_of_installed_release_is_not_taken_over(template: Template, install: Install) -> None:
    values = ('controller.namespaces=["team-a"]',)
    there = controller(template, "stage2", "stage2-system", *values)
    elsewhere = controller(template, "third", "stage2-system", *values)
    mine = ('--set-json=controller.namespaces=["team-b"]', "--take-ownership")
    with serving(definition("stage2", "stage2-system"), namespace("team-b"), there) as server:
        refused = install(server, *mine)
        assert install(server, *mine, "--set=crd.install=false") == ""
    assert "belongs to the release stage2 in the namespace stage2-system; set crd.install=false" in refused
    with serving(definition("stage2", "stage2-system"), namespace("team-b"), elsewhere) as server:
        assert install(server, *mine) == ""


ALL = "controller.namespaces=[]"
A, B, AB = (
    'controller.namespaces=["team-a"]',
    'controller.namespaces=["team-b"]',
    'controller.namespaces=["team-a","team-b"]',
)


@pytest.mark.parametrize(
    ("theirs", "mine", "shared"),
    [
        (ALL, ALL, "all namespaces"),
        (ALL, A, "the namespaces team-a"),
        (A, ALL, "the namespaces team-a"),
        (AB, B, "the namespaces team-b"),
        (A, B, ""),
    ],
)
def test_second_release_for_same_namespace_is_refused(template: Template, theirs: str, mine: str, shared: str) -> None:
    other = controller(template, "first", "first-system", theirs)
    with serving(namespace("team-a"), namespace("team-b"), other) as server:
        if not shared:
            assert template(mine, "crd.install=false", server=server)
            return
        with pytest.raises(ValueError, match=f"the release first in the namespace first-system serves {shared} too"):
            template(mine, "crd.install=false", server=server)


def test_release_does_not_conflict_with_itself_or_unrelated_controller(template: Template) -> None:
    own = controller(template, "stage2", "stage2-system")
    ingress = controller(template, "ingress", "ingress-system")
    del ingress["spec"]["template"]["metadata"]["labels"]["stage2.dev/role"]
    with serving(own, ingress) as server:
        assert template(server=server)


def test_overlapping_releases_can_be_separated_by_upgrade(template: Template) -> None:
    mine = controller(template, "stage2", "stage2-system", ALL)
    other = controller(template, "first", "first-system", ALL)
    with serving(namespace("team-a"), mine, other) as server:
        assert template(A, "crd.install=false", server=server)
        mine["spec"]["template"]["spec"]["containers"][0]["args"].append("--namespace=team-a")
        other["spec"]["template"]["spec"]["containers"][0]["args"].append("--namespace=team-b")
        with pytest.raises(
            ValueError, match="the release first in the namespace first-system serves the namespaces team-b"
        ):
            template(ALL, "crd.install=false", server=server)


def test_namespaced_install_needs_no_right_to_list_all_deployments(template: Template) -> None:
    narrow = ("crd.install", "controller.placement", "rbac.aggregate", "policy.admission")
    other = controller(template, "first", "first-system", A)
    with serving(namespace("team-a"), other) as server:
        assert template(A, *(f"{value}=false" for value in narrow), server=server)
