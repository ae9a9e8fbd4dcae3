"""What the chart gives people: rights over jobs in their namespaces, releases beside each other, drains that pass."""

from collections.abc import Mapping
from typing import Any

import pytest

from stage2_controller.children.network import CONTROLLER_LABELS
from tests.unit.charts.conftest import Template

Manifests = Mapping[tuple[str, str], Mapping[str, Any]]
READ = {"get", "list", "watch"}
WRITE = {"create", "update", "patch", "delete"}
CRD = ("CustomResourceDefinition", "rolloutmatchingjobs.stage2.dev")


@pytest.mark.parametrize(
    ("role", "verbs"), [("view", READ), ("edit", READ | WRITE), ("admin", READ | WRITE | {"deletecollection"})]
)
def test_who_may_view_or_edit_a_namespace_may_do_so_with_its_jobs(
    template: Template, role: str, verbs: set[str]
) -> None:
    made = template()["ClusterRole", f"stage2-{role}"]
    assert made["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
    (rule,) = made["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["stage2.dev"], ["rolloutmatchingjobs"])
    assert set(rule["verbs"]) == verbs
    grants = made["metadata"]["annotations"]["stage2.dev/grants"]
    assert ("runs programs" in grants) is ("create" in verbs)
    assert ("Deletes all" in grants) is ("deletecollection" in verbs)


def test_an_admin_may_keep_these_rights_to_themselves(template: Template) -> None:
    assert ("ClusterRole", "stage2-edit") not in template("rbac.aggregate=false")


@pytest.mark.parametrize(
    "value", ['nameOverride="trainer"', 'fullnameOverride="other"', 'controller.podLabels={"stage2.dev/role":"b"}']
)
def test_jobs_know_the_controller_whatever_it_is_called(template: Template, value: str) -> None:
    (deployment,) = [made for (kind, _), made in template(value).items() if kind == "Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert CONTROLLER_LABELS.items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_releases_of_one_name_in_two_namespaces_share_no_object(template: Template) -> None:
    one = template('controller.namespaces=["team-a"]', namespace="a-system")
    other = template('controller.namespaces=["team-b"]', "crd.install=false", namespace="b-system")
    assert not _places(one) & _places(other)
    assert CRD in one
    assert CRD not in other


def test_no_two_releases_make_one_name_of_the_cluster_of_their_namespaces_and_their_own(template: Template) -> None:
    """`team` with `x-stage2`, and `team-x` with `stage2`: only a character that no namespace has keeps them apart."""
    one = template('controller.namespaces=["team-a"]', release="x-stage2", namespace="team")
    other = template('controller.namespaces=["team-b"]', "crd.install=false", release="stage2", namespace="team-x")
    assert not _places(one) & _places(other)
    assert ("ClusterRole", "team.x-stage2") in one
    assert ("ClusterRole", "team-x.stage2-view") in other


def _places(manifests: Manifests) -> set[tuple[str, str | None, str]]:
    return {(kind, made["metadata"].get("namespace"), name) for (kind, name), made in manifests.items()}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_drain_takes_one_controller_at_a_time_and_is_never_stopped_by_it(template: Template, replicas: int) -> None:
    manifests = template(f"controller.replicas={replicas}")
    budget = manifests["PodDisruptionBudget", "stage2"]["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert budget["selector"] == manifests["Deployment", "stage2"]["spec"]["selector"]
    assert ("PodDisruptionBudget", "stage2") not in template("controller.podDisruptionBudget=false")


def test_a_figures_own_namespace_is_kept_where_the_controller_reports_it_and_not_where_a_tenant_does(
    template: Template,
) -> None:
    manifests = template("metrics.serviceMonitor.enabled=true", "metrics.podMonitor.enabled=true")
    (of_controller,) = manifests["ServiceMonitor", "stage2"]["spec"]["endpoints"]
    (of_learners,) = manifests["PodMonitor", "stage2-learners"]["spec"]["podMetricsEndpoints"]
    assert of_controller["honorLabels"] is True
    assert of_learners["honorLabels"] is False


def test_only_the_port_of_metrics_and_health_of_the_controller_can_be_reached(template: Template) -> None:
    manifests = template()
    policy = manifests["NetworkPolicy", "stage2"]["spec"]
    (container,) = manifests["Deployment", "stage2"]["spec"]["template"]["spec"]["containers"]
    assert policy["podSelector"] == manifests["Deployment", "stage2"]["spec"]["selector"]
    assert policy["ingress"] == [{"ports": [{"port": container["ports"][0]["name"]}]}]
    assert policy["egress"] == [{}]
    assert ("NetworkPolicy", "stage2") not in template("controller.networkPolicy=false")
