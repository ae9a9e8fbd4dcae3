"""Which node a job gets, by room, taints and affinity, and what is reported when none has room."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.children.build import build, parse
from stage2_controller.children.pods import Control
from stage2_controller.job.objects import pod_requests
from stage2_controller.place import node_fit
from stage2_controller.place.node_fit import PREFERRED, REQUIRED, Need, PodNeed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n

SIDECAR = {"restartPolicy": "Always"}


def container(name: str = "x", **amounts: str) -> dict[str, Any]:
    return {"name": name, "resources": {"requests": amounts}}


TWO = [container(cpu="1"), container("y", cpu="500m")]
SIDE, GREEDY = {**container("side", cpu="1"), **SIDECAR}, container("greedy", cpu="4")
INITS: list[tuple[str, float, list[Any]]] = [
    ("none", 1.5, []),
    ("a greedy one", 4, [GREEDY]),
    ("a sidecar", 2.5, [SIDE]),
    ("a sidecar before a greedy one", 5, [SIDE, GREEDY]),
    ("a greedy one before a sidecar", 4, [GREEDY, SIDE]),
    ("a greedy one between two sidecars", 5, [SIDE, GREEDY, {**SIDE, "name": "other"}]),
    ("two greedy ones", 4, [GREEDY, container("less", cpu="3")]),
]


@pytest.mark.parametrize(("cpu", "inits"), [row[1:] for row in INITS], ids=[row[0] for row in INITS])
def test_pod_requests_count_sidecars_and_init_containers(cpu: float, inits: list[Any]) -> None:
    assert pod_requests({"containers": TWO, "initContainers": inits}) == {"cpu": cpu, "pods": 1}
    boxed = {"containers": TWO, "initContainers": inits, "overhead": {"cpu": "250m"}}
    assert pod_requests(boxed) == {"cpu": cpu + 0.25, "pods": 1}


def test_negative_request_does_not_offset_other_requests() -> None:
    """The API server refuses such a pod; the sum of a job goes by its template before that."""
    spec = {"containers": [{"resources": {"limits": {n.GPU: "16"}}}, {"resources": {"limits": {n.GPU: "-100"}}}]}
    assert pod_requests(spec) == {n.GPU: 16, "pods": 1}


def test_missing_request_defaults_to_limit() -> None:
    spec = {"containers": [{"resources": {"limits": {"cpu": "2", n.GPU: "1"}, "requests": {"cpu": "1"}}}]}
    assert pod_requests(spec) == {"cpu": 1, n.GPU: 1, "pods": 1}


def test_pod_level_requests_replace_container_requests() -> None:
    containers = [{"resources": {"limits": {n.GPU: "1"}, "requests": {"cpu": "1"}}}, {"resources": {}}]
    spec = {"containers": containers, "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "1Gi"}}}
    assert pod_requests({**spec, "overhead": {"cpu": "500m"}}) == {"cpu": 8.5, "memory": 2**30, n.GPU: 1, "pods": 1}


def test_pod_level_limit_counts_only_for_resources_no_container_requests() -> None:
    limits = {"cpu": "40", "memory": "1Gi"}
    found = pod_requests({"containers": [container(cpu="4"), {"name": "bare"}], "resources": {"limits": limits}})
    assert found == {"cpu": 4, "memory": 2**30, "pods": 1}


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


def need(gpus: float = 4, *, priority: int = 0, preempts: bool = True, **pod: Any) -> Need:
    requests = {n.GPU: gpus, "pods": 1, **pod.pop("requests", {})}
    return Need((PodNeed("learner", requests, **pod),), priority=priority, preempts=preempts, gpu_resource=n.GPU)


def chosen(asked: Need, *objects: Any) -> str | None:
    return node_fit.choose_node(asked, n.seen(n.capacity(*objects), asked))


def reported(asked: Need, *objects: Any) -> str:
    return node_fit.why_none_fits(asked, n.seen(n.capacity(*objects), asked))


def test_servers_and_learner_must_fit_on_one_node() -> None:
    assert chosen(n.FOUR, n.node("a", 3), n.node("b", 3)) is None
    assert chosen(n.FOUR, n.node("a", 3), n.node("b", 4)) == "b"


def test_largest_free_node_is_reported_with_what_it_lacks() -> None:
    message = reported(n.FOUR, n.node("node-a", 4), n.foreign("node-a", gpus=1), n.node("node-b", 2))
    assert message == "needs 4 nvidia.com/gpu on one node; the largest free is 3 on node-a"


def test_fullest_node_that_fits_is_chosen() -> None:
    assert chosen(need(2), n.node("a", 8), n.node("b", 4), n.node("c", 1)) == "b"
    assert chosen(need(2), n.node("b"), n.node("a")) == "a", "of equals, by name"


SILENT = n.node()
SILENT["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("cordoned", n.node(unschedulable=True), {}, "node-a is cordoned (kubectl uncordon)"),
    ("not ready", n.node(not_ready=True), {}, "node-a is not ready"),
    ("silent", SILENT, {}, "node-a is not ready"),
    ("without the label", n.node(), {"node_selector": {"zone": "x"}}, "lacks the label zone=x (spec.placement"),
    ("tainted", n.node(taints=[TAINT]), {}, "has the taint gpu=yes:NoSchedule (spec.placement.tolerations)"),
]


@pytest.mark.parametrize(("node", "pod", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_unusable_node_is_not_chosen_and_reason_is_reported(node: Any, pod: Any, words: str) -> None:
    assert chosen(need(**pod), node) is None
    assert words in reported(need(**pod), node)


@pytest.mark.parametrize(
    "toleration",
    [
        {"operator": "Exists"},
        {"key": "gpu", "operator": "Exists"},
        {"key": "gpu", "operator": "Exists", "effect": ""},
        {"key": "gpu", "value": "yes"},
        {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
    ],
)
def test_tolerated_taint_is_ignored(toleration: dict[str, str]) -> None:
    assert chosen(need(tolerations=[toleration]), n.node("a", taints=[TAINT])) == "a"


@pytest.mark.parametrize(
    "toleration",
    [{"key": "gpu", "value": "no"}, {"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, {"key": "other"}],
)
def test_non_matching_toleration_does_not_admit_tainted_node(toleration: dict[str, str]) -> None:
    assert chosen(need(tolerations=[toleration]), n.node("a", taints=[TAINT])) is None


def test_prefer_no_schedule_taint_is_ignored() -> None:
    assert chosen(need(), n.node("a", taints=[{**TAINT, "effect": "PreferNoSchedule"}])) == "a"


def test_cpu_and_memory_must_fit_like_gpus() -> None:
    asked = need(1, requests={"cpu": 31.5, "memory": 2.0**30})
    assert chosen(asked, n.node("a"), n.foreign("a", cpu="500m")) == "a"
    assert chosen(asked, n.node("a"), n.foreign("a", cpu="501m")) is None
    assert reported(asked, n.node("a"), n.foreign("a", cpu="501m")) == (
        "needs 31.5 cpu on one node; the largest free is 31.499 on a"
    )


def test_resources_free_only_on_different_nodes_are_reported_together() -> None:
    asked = need(4, requests={"cpu": 16})
    nodes = [n.node("a", 4, has={"cpu": "2"}), n.node("b", 0), n.node("c", 1, has={"cpu": "2", "pods": "999"})]
    assert reported(asked, *nodes) == (
        "needs 4 nvidia.com/gpu, 16 cpu, 1 pods together on one node; b has only 0 nvidia.com/gpu free"
    )


def test_finished_pods_take_no_room() -> None:
    assert chosen(n.FOUR, n.node("a", 4), n.foreign("a", gpus=4, phase="Succeeded")) == "a"


def test_job_preempts_lower_priority_pods_only_if_no_other_node_fits() -> None:
    busy = (n.node("a", 4), n.foreign("a", gpus=4, priority=5))
    assert chosen(need(priority=10), *busy) == "a"
    assert chosen(need(priority=10), *busy, n.node("b", 8)) == "b"
    assert chosen(need(priority=5), *busy) is None
    assert chosen(need(priority=10, preempts=False), *busy) is None


def test_preemption_is_planned_only_if_it_makes_room_for_whole_job() -> None:
    """The scheduler judges each pod alone: it would end others for the servers, and then refuse the learner."""
    asked = replace(n.FOUR, priority=10)
    node, weaker, equal = n.node("a", 8), n.foreign("a", gpus=3, priority=5), n.foreign("a", gpus=5, priority=10)
    assert chosen(asked, node, weaker, equal) is None
    assert chosen(asked, node, weaker, n.foreign("a", gpus=4, priority=10)) == "a"


def test_job_without_priority_preempts_pods_with_negative_priority() -> None:
    """Such are the placeholders by which clusters keep nodes warm."""
    assert chosen(need(), n.node("a", 4), n.foreign("a", gpus=4, priority=-10)) == "a"


def hosts(*names: str) -> node_fit.Avoided:
    return tuple((node_fit.HOSTNAME, name) for name in names)


KARPENTER = n.node("other", 0, labels={"karpenter.sh/nodepool": "default"})


def half_rooms(asked: Need, *objects: Any) -> node_fit.Avoided:
    return node_fit.half_rooms(asked, n.seen(n.capacity(*objects), asked))


def test_nodes_that_fit_only_servers_are_avoided_and_full_ones_ignored_with_karpenter() -> None:
    taken = (n.foreign("full", gpus=4), n.foreign("part", gpus=1))
    objects = (n.node("full", 4), n.node("part", 4), n.node("small", 2), *taken)
    assert half_rooms(n.FOUR, *objects) == hosts("full", "part")
    assert half_rooms(n.FOUR, *objects, KARPENTER) == hosts("part")
    assert half_rooms(need(), *objects) == ()


def test_with_karpenter_node_that_fits_servers_by_preemption_is_avoided() -> None:
    """Else the scheduler evicts others for half of a job, again and again."""
    strong = replace(n.FOUR, priority=10)
    objects = (n.node("a", 3, labels={node_fit.INSTANCE_TYPE: "small"}), n.foreign("a", gpus=3), KARPENTER)
    assert half_rooms(strong, *objects) == ((node_fit.INSTANCE_TYPE, "small"),)
    assert half_rooms(replace(strong, preempts=False), *objects) == ()


CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
CLOSED: list[tuple[str, Any]] = [
    ("cordoned", {"unschedulable": True}),
    ("cordoned, with the taint", {"unschedulable": True, "taints": [CORDON]}),
    ("tainted", {"taints": [TAINT]}),
]


@pytest.mark.parametrize("closed", [row[1] for row in CLOSED], ids=[row[0] for row in CLOSED])
def test_tainted_or_cordoned_node_is_avoided_with_karpenter_only_if_pods_tolerate_it(closed: dict[str, Any]) -> None:
    node = n.node("a", 3, **closed)
    passing = replace(n.FOUR, pods=tuple(replace(pod, tolerations=[{"operator": "Exists"}]) for pod in n.FOUR.pods))
    for asked in (n.FOUR, passing):
        assert half_rooms(asked, node) == hosts("a")
    assert half_rooms(n.FOUR, node, KARPENTER) == ()
    assert half_rooms(passing, node, KARPENTER) == hosts("a")
    elsewhere = replace(n.FOUR, pods=tuple(replace(pod, node_selector={"zone": "b"}) for pod in n.FOUR.pods))
    assert half_rooms(elsewhere, node) == ()


def of_every_node(kind: str) -> Any:
    pod = n.foreign("a", cpu="1")
    pod["metadata"]["ownerReferences"] = [{"kind": kind}]
    return pod


@pytest.mark.parametrize(("kind", "lasts"), [("DaemonSet", True), ("Node", True), ("ReplicaSet", False)])
def test_instance_type_left_too_small_by_daemonset_pods_is_avoided(kind: str, lasts: bool) -> None:
    asked = Need((PodNeed("rollout", {n.GPU: 3}), PodNeed("learner", {n.GPU: 1, "cpu": 31.5})), gpu_resource=n.GPU)
    node = n.node("a", labels={node_fit.INSTANCE_TYPE: "small"})
    named = ((node_fit.INSTANCE_TYPE, "small"),) if lasts else hosts("a")
    assert half_rooms(asked, node, of_every_node(kind), KARPENTER) == named


def test_overbooked_resource_does_not_matter_to_job_that_requests_none() -> None:
    overbooked = (n.node("a"), n.foreign("a", cpu="40"))
    assert chosen(need(4, requests={"cpu": 0.0}), *overbooked) == "a"
    assert reported(need(5, requests={"cpu": 0.0}), *overbooked).startswith("needs 5 nvidia.com/gpu")
    assert reported(need(4, requests={"cpu": 1}), *overbooked) == "needs 1 cpu on one node; the largest free is 0 on a"


def test_with_karpenter_nodes_of_too_small_instance_type_are_avoided_by_type() -> None:
    def typed(name: str, gpus: int, kind: str) -> Any:
        return n.node(name, gpus, labels={node_fit.INSTANCE_TYPE: kind})

    objects = (typed("a", 3, "small"), typed("b", 3, "small"), typed("c", 4, "large"), typed("d", 3, "large"))
    avoided = half_rooms(n.FOUR, *objects, n.foreign("c", gpus=1), KARPENTER)
    assert avoided == (*hosts("c", "d"), (node_fit.INSTANCE_TYPE, "small"))


def test_nodes_that_refused_job_and_their_zone_are_tried_last() -> None:
    """Such as where its volume lies in another zone, which is not seen here."""
    asked = need()
    labels = {name: {node_fit.ZONE: name[0]} for name in ("a1", "a2", "b1")}
    nodes = {info.name: info for info in n.seen(n.capacity(*(n.node(x, labels=y) for x, y in labels.items())), asked)}

    def chosen_after(*refused: str) -> str | None:
        seen = [replace(info, refused=name in refused) for name, info in nodes.items()]
        return node_fit.choose_node(asked, seen)

    assert chosen_after() == "a1"
    assert chosen_after("a1") == "b1"
    assert chosen_after("a1", "b1") == "a2"
    assert chosen_after("a1", "a2", "b1") == "a1"


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)} if values else {"key": key, "operator": operator}


def required(*terms: Any) -> dict[str, Any]:
    return {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": list(term)} for term in terms]}}


def preferred(weight: int, *expressions: Any) -> dict[str, Any]:
    return {"weight": weight, "preference": {"matchExpressions": list(expressions)}}


H100 = expression("gpu", "In", "h100", "h200")


@pytest.mark.parametrize(
    ("one", "labels", "taken"),
    [
        (H100, {"gpu": "h200"}, True),
        (H100, {"gpu": "a100"}, False),
        (H100, {}, False),
        (expression("gpu", "NotIn", "a100"), {"gpu": "h100"}, True),
        (expression("gpu", "NotIn", "a100"), {"gpu": "a100"}, False),
        (expression("gpu", "NotIn", "a100"), {}, True),
        (expression("gpu", "Exists"), {"gpu": ""}, True),
        (expression("gpu", "Exists"), {}, False),
        (expression("gpu", "DoesNotExist"), {}, True),
        (expression("gpu", "DoesNotExist"), {"gpu": ""}, False),
        (expression("memory", "Gt", "79"), {"memory": "80"}, True),
        (expression("memory", "Gt", "80"), {"memory": "80"}, False),
        (expression("memory", "Lt", "-1"), {"memory": "-2"}, True),
        (expression("memory", "Lt", "80"), {"memory": "much"}, False),
        (expression("memory", "Lt", "80"), {}, False),
    ],
)
def test_node_affinity_operators_match_as_in_scheduler(one: Any, labels: dict[str, str], taken: bool) -> None:
    assert node_fit.affinity_takes(required([one]), labels) is taken


def test_node_affinity_needs_one_term_whose_expressions_all_match() -> None:
    affinity = required([H100, expression("zone", "NotIn", "b")], [expression("pool", "Exists")])
    assert node_fit.affinity_takes(affinity, {"gpu": "h100", "zone": "a"})
    assert not node_fit.affinity_takes(affinity, {"gpu": "h100", "zone": "b"})
    assert node_fit.affinity_takes(affinity, {"pool": "mine", "zone": "b"})


def attracted(affinity: dict[str, Any]) -> Need:
    return Need((PodNeed("learner", {n.GPU: 1, "pods": 1}, affinity=affinity),), gpu_resource=n.GPU)


def test_node_outside_affinity_is_not_chosen_and_reason_is_reported() -> None:
    asked = attracted(required([H100, expression("zone", "NotIn", "b")], [expression("pool", "Exists")]))
    infos = n.seen(n.capacity(n.node("a", labels={"gpu": "a100"})), asked)
    assert node_fit.choose_node(asked, infos) is None
    reported = node_fit.why_none_fits(asked, infos)
    assert "a is none of gpu In (h100, h200), zone NotIn (b) or pool Exists (spec.placement.affinity)" in reported


def test_preferred_affinity_goes_before_fullest_node() -> None:
    asked = attracted({PREFERRED: [preferred(10, H100), preferred(5, expression("zone", "In", "a"))]})
    nodes = [n.node("full", 1), n.node("near", 2, labels={"zone": "a"}), n.node("best", 8, labels={"gpu": "h100"})]
    infos = n.seen(n.capacity(*nodes), asked)
    assert node_fit.choose_node(asked, infos) == "best"
    assert node_fit.choose_node(asked, infos[:2]) == "near"


AFFINITY = {"nodeAffinity": {**required([H100], [expression("pool", "Exists")]), PREFERRED: [preferred(1, H100)]}}


def affinity_of(manifest: Any) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]["affinity"]
    return found


def planned_child(kind: str, **choice: Any) -> Any:
    raw = b.job(placement={"affinity": copy.deepcopy(AFFINITY)})
    children = build(parse(raw, b.SETTINGS), b.SETTINGS, control=Control("uid", "hash", **choice))
    return next(one for one in children if one["kind"] == kind)


def test_scheduler_mode_pods_carry_job_affinity_and_learner_follows_servers() -> None:
    assert affinity_of(planned_child("Deployment")) == AFFINITY
    assert affinity_of(planned_child("Job"))["nodeAffinity"] == AFFINITY["nodeAffinity"]
    assert "podAffinity" in affinity_of(planned_child("Job"))


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_chosen_node_is_added_to_every_affinity_term(kind: str) -> None:
    affinity = affinity_of(planned_child(kind, node="node-a"))
    assert affinity.keys() == {"nodeAffinity"}
    here = [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]
    terms = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    own = AFFINITY["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert terms == [{**term, "matchFields": here} for term in own]


def test_avoided_nodes_are_excluded_in_every_affinity_term() -> None:
    avoided = ((node_fit.HOSTNAME, "a"), (node_fit.HOSTNAME, "b"), (node_fit.INSTANCE_TYPE, "small"))
    terms = affinity_of(planned_child("Deployment", avoid=avoided))["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    none = [expression(node_fit.HOSTNAME, "NotIn", "a", "b"), expression(node_fit.INSTANCE_TYPE, "NotIn", "small")]
    assert [term["matchExpressions"] for term in terms] == [[H100, *none], [expression("pool", "Exists"), *none]]
