"""What somebody who has taken over the controller may do: what the threat model says, and no more."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.unit.charts.conftest import Manifests, Template

READS = {"get", "list", "watch"}
NARROW = ('controller.namespaces=["team-a"]', "controller.placement=false")
# What makes rights or leads into the containers of others.
POWERS = {"roles", "rolebindings", "clusterroles", "clusterrolebindings", "serviceaccounts", "serviceaccounts/token"}
POWERS |= {"pods/exec", "pods/attach", "pods/log", "pods/portforward", "pods/ephemeralcontainers", "pods/eviction"}
POWERS |= {"validatingwebhookconfigurations", "mutatingwebhookconfigurations", "customresourcedefinitions"}
POWERS |= {"namespaces", "persistentvolumes", "validatingadmissionpolicies", "certificatesigningrequests"}


def granted(manifests: Manifests) -> Iterator[tuple[str, str, str, str]]:
    """Scope (a namespace, or empty for the cluster), group, resource and verb of each right of the controller."""
    for (kind, _), binding in manifests.items():
        if kind not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        role = manifests[binding["roleRef"]["kind"], binding["roleRef"]["name"]]
        for rule in role["rules"]:
            for group, resource, verb in _each(rule):
                yield binding["metadata"].get("namespace", ""), group, resource, verb


def _each(rule: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                yield group, resource, verb


@pytest.mark.parametrize("values", [(), NARROW, ("controller.kueue=true",)], ids=["default", "narrow", "kueue"])
def test_controller_cannot_escalate_rights_or_enter_containers(template: Template, values: Any) -> None:
    rights = set(granted(template(*values)))
    assert not {resource for _, _, resource, _ in rights} & POWERS
    assert not {one for _, *rest in rights for one in rest if "*" in one}
    assert not {verb for *_, verb in rights} & {"impersonate", "escalate", "bind", "deletecollection"}
    assert {verb for _, _, resource, verb in rights if resource == "secrets"} == {"get", "create", "delete"}


def test_controller_writes_no_cluster_scoped_objects(template: Template) -> None:
    rights = set(granted(template('controller.namespaces=["team-a"]', "controller.kueue=true")))
    assert {verb for scope, _, _, verb in rights if not scope} <= READS
    assert {resource for scope, _, resource, _ in rights if not scope} == {
        *("nodes", "pods", "priorityclasses", "resourceflavors", "workloadpriorityclasses")
    }


def test_controller_of_listed_namespaces_without_placement_has_no_cluster_role(template: Template) -> None:
    rights = set(granted(template(*NARROW)))
    assert {scope for scope, *_ in rights} == {"team-a", "stage2-system"}
    in_its_own = {(resource, verb) for scope, _, resource, verb in rights if scope == "stage2-system"}
    assert in_its_own == {("leases", verb) for verb in ("create", "get", "update")}


def test_controller_pod_has_no_access_to_its_node(template: Template) -> None:
    spec = template()["Deployment", "stage2"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["volumes"] == [{"name": "tmp", "emptyDir": {}}]
    assert not {key for key in spec if key.startswith("host")}
