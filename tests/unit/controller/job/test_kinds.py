"""One entry says what a kind of child is: the state, the requests and the chart's rights agree with it."""

import dataclasses
import re
from pathlib import Path

import pytest

from stage2_controller.cluster import api_server
from stage2_controller.observed import Observed
from stage2_controller.spec import kinds
from stage2_controller.spec.kinds import ChildKind
from tests.unit.controller import builders as b

RULES = Path(__file__).parents[4] / "charts" / "stage2" / "templates" / "_helpers.tpl"
RULE = re.compile(r'- apiGroups: \["?([^"\]]*)"?\]\n  resources: \[([^\]]*)\].*\n  verbs: \[([^\]]*)\]')
BY_KIND = pytest.mark.parametrize("child", kinds.CHILDREN, ids=lambda child: child.kind)


def granted() -> dict[tuple[str, str], set[str]]:
    """Return the verbs that the chart allows, by API group and resource."""
    found = RULE.findall(RULES.read_text(encoding="utf-8"))
    return {(group, name): set(verbs.split(", ")) for group, names, verbs in found for name in names.split(", ")}


@BY_KIND
def test_the_chart_grants_just_what_is_done_with_a_kind(child: ChildKind) -> None:
    needed = {"get", "create"}
    needed |= {"list", "watch"} if child.watched else set()
    needed |= set() if child.create_once else {"patch"}
    needed |= {"delete"} if child.has_pods or child.of_kueue or child in (kinds.SECRET, kinds.SERVICE) else set()
    group = child.api_version.rpartition("/")[0]
    assert granted()[group, child.plural] == needed


def test_the_chart_grants_just_what_is_done_with_the_addresses_behind_a_service() -> None:
    assert granted()["discovery.k8s.io", "endpointslices"] == {"list", "watch", "create", "patch"}
    assert granted()["apps", "replicasets"] == {"list", "watch"}


@BY_KIND
def test_the_observed_state_has_a_field_for_each_kind(child: ChildKind) -> None:
    assert child.field in {field.name for field in dataclasses.fields(Observed)}
    there = {"metadata": {"name": "x"}}
    assert dataclasses.replace(b.NOTHING, **{child.field: there}).child(child.kind) == there


@BY_KIND
def test_a_child_has_the_version_and_the_name_of_its_kind(child: ChildKind) -> None:
    raw = b.job()
    if child.of_kueue:
        raw["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    observed = b.NOTHING if child.of_kueue else b.started(raw, secret=None)
    made = b.child(b.planned(raw, observed), child.kind)
    assert made["apiVersion"] == child.api_version
    assert made["metadata"]["name"] == f"job-3v1-{child.role}"


def test_requests_go_to_the_path_of_the_kind() -> None:
    assert api_server.path("Secret", "n", "x") == "/api/v1/namespaces/n/secrets/x"
    assert api_server.path("NetworkPolicy", "n") == "/apis/networking.k8s.io/v1/namespaces/n/networkpolicies"
    assert api_server.path("PriorityClass", None, "x") == "/apis/scheduling.k8s.io/v1/priorityclasses/x"


def test_workloads_are_watched_only_where_kueue_is_served() -> None:
    assert set(kinds.watched(kueue=True)) - set(kinds.watched(kueue=False)) == {kinds.WORKLOAD}
    assert not {"ConfigMap", "Secret"} & {resource.kind for resource in kinds.watched(kueue=True)}
