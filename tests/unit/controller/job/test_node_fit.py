"""Which node a job gets, and what is said when none has room."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.job import node_fit
from stage2_controller.job.node_fit import Autoscaling, Need, PodNeed
from tests.unit.controller import nodes as n

GPU = "nvidia.com/gpu"
FOUR = Need((PodNeed("rollout", {GPU: 3, "pods": 1}), PodNeed("learner", {GPU: 1, "pods": 1})), gpu_resource=GPU)
TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


def need(gpus: float = 4, *, priority: int = 0, preempts: bool = True, **pod: Any) -> Need:
    requests = {GPU: gpus, "pods": 1, **pod.pop("requests", {})}
    return Need((PodNeed("learner", requests, **pod),), priority=priority, preempts=preempts, gpu_resource=GPU)


def chosen(asked: Need, *objects: Any) -> str | None:
    return node_fit.choose_node(asked, n.capacity(*objects).nodes_for(n.KEY, asked))


def told(asked: Need, *objects: Any) -> str:
    return node_fit.why_none_fits(asked, n.capacity(*objects).nodes_for(n.KEY, asked))


def test_servers_and_learner_need_one_node_together() -> None:
    assert chosen(FOUR, n.node("a", 3), n.node("b", 3)) is None
    assert chosen(FOUR, n.node("a", 3), n.node("b", 4)) == "b"


def test_the_largest_free_node_is_named_with_what_it_lacks() -> None:
    message = told(FOUR, n.node("node-a", 4), n.foreign("node-a", gpus=1), n.node("node-b", 2))
    assert message == "needs 4 nvidia.com/gpu on one node; the largest free is 3 on node-a"


def test_the_fullest_node_that_fits_is_taken() -> None:
    assert chosen(need(2), n.node("a", 8), n.node("b", 4), n.node("c", 1)) == "b"


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("cordoned", n.node(unschedulable=True), {}, "node-a is cordoned (kubectl uncordon)"),
    ("not ready", n.node(not_ready=True), {}, "node-a is not ready"),
    ("without the label", n.node(), {"node_selector": {"zone": "x"}}, "lacks the label zone=x (spec.placement"),
    ("tainted", n.node(taints=[TAINT]), {}, "has the taint gpu=yes:NoSchedule (spec.placement.tolerations)"),
]


@pytest.mark.parametrize(("node", "pod", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_node_that_pods_may_not_use_is_not_chosen_and_the_reason_is_told(node: Any, pod: Any, words: str) -> None:
    assert chosen(need(**pod), node) is None
    assert words in told(need(**pod), node)


@pytest.mark.parametrize(
    "toleration",
    [
        {"operator": "Exists"},
        {"key": "gpu", "operator": "Exists"},
        {"key": "gpu", "value": "yes"},
        {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
    ],
)
def test_a_tolerated_taint_does_not_matter(toleration: dict[str, str]) -> None:
    assert chosen(need(tolerations=[toleration]), n.node("a", taints=[TAINT])) == "a"


@pytest.mark.parametrize(
    "toleration",
    [{"key": "gpu", "value": "no"}, {"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, {"key": "other"}],
)
def test_another_toleration_does_not_help(toleration: dict[str, str]) -> None:
    assert chosen(need(tolerations=[toleration]), n.node("a", taints=[TAINT])) is None


def test_a_taint_that_only_prefers_does_not_matter() -> None:
    assert chosen(need(), n.node("a", taints=[{**TAINT, "effect": "PreferNoSchedule"}])) == "a"


def test_processors_and_memory_count_like_gpus() -> None:
    asked = need(1, requests={"cpu": 31.5, "memory": 2.0**30})
    assert chosen(asked, n.node("a"), n.foreign("a", cpu="500m")) == "a"
    assert chosen(asked, n.node("a"), n.foreign("a", cpu="501m")) is None
    assert told(asked, n.node("a"), n.foreign("a", cpu="501m")) == (
        "needs 31.5 cpu on one node; the largest free is 31.499 on a"
    )


def test_amounts_that_exist_on_different_nodes_only_are_told_together() -> None:
    asked = need(4, requests={"cpu": 16})
    message = told(asked, n.node("a", 4, has={"cpu": "2"}), n.node("b", 1))
    assert message.startswith("needs 4 nvidia.com/gpu, 16 cpu, 1 pods together on one node;")


def test_pods_that_have_ended_take_no_room() -> None:
    assert chosen(FOUR, n.node("a", 4), n.foreign("a", gpus=4, phase="Succeeded")) == "a"


def test_a_higher_priority_takes_the_room_of_lower_ones_only_if_there_is_no_other() -> None:
    busy = (n.node("a", 4), n.foreign("a", gpus=4, priority=5))
    assert chosen(need(priority=10), *busy) == "a"
    assert chosen(need(priority=10), *busy, n.node("b", 8)) == "b"
    assert chosen(need(priority=5), *busy) is None
    assert chosen(need(priority=10, preempts=False), *busy) is None


def test_a_job_without_a_priority_takes_the_room_of_pods_that_have_less_than_none() -> None:
    """Such are the placeholders by which clusters keep nodes warm."""
    assert chosen(need(), n.node("a", 4), n.foreign("a", gpus=4, priority=-10)) == "a"


def test_requests_count_as_the_scheduler_counts_them() -> None:
    def container(**amounts: str) -> dict[str, Any]:
        return {"resources": {"requests": amounts}}

    containers = [container(cpu="1"), container(cpu="500m")]
    assert node_fit.requests({"containers": containers}) == {"cpu": 1.5, "pods": 1}
    greedy = {"containers": containers, "initContainers": [container(cpu="4")], "overhead": {"cpu": "250m"}}
    assert node_fit.requests(greedy) == {"cpu": 4.25, "pods": 1}
    sidecar = {"containers": containers, "initContainers": [{**container(cpu="1"), "restartPolicy": "Always"}]}
    assert node_fit.requests(sidecar) == {"cpu": 2.5, "pods": 1}


def test_what_a_pod_asks_for_as_a_whole_counts_in_place_of_its_containers() -> None:
    containers = [{"resources": {"limits": {GPU: "1"}, "requests": {"cpu": "1"}}}, {"resources": {}}]
    spec = {"containers": containers, "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "1Gi"}}}
    assert node_fit.requests({**spec, "overhead": {"cpu": "500m"}}) == {"cpu": 8.5, "memory": 2**30, GPU: 1, "pods": 1}


POOL = {"labels": {"eks.amazonaws.com/nodegroup": "gpus"}}
COMING: list[tuple[str, bool, list[Any]]] = [
    ("no node at all", True, []),
    ("a busy one", True, [n.node("a", 4), n.foreign("a", gpus=4)]),
    ("a pool that can grow", True, [n.node("a", 0, **POOL)]),
    ("one that is too small", False, [n.node("a", 3)]),
    ("one that must not be used", False, [n.node("a", 8, taints=[TAINT])]),
]


@pytest.mark.parametrize(("may", "objects"), [row[1:] for row in COMING], ids=[row[0] for row in COMING])
def test_a_node_may_come_where_one_is_busy_or_pools_can_grow(may: bool, objects: list[Any]) -> None:
    nodes = n.capacity(*objects).nodes_for(n.KEY, FOUR)
    assert node_fit.may_be_made(FOUR, nodes, Autoscaling()) is may
    assert not node_fit.may_be_made(FOUR, nodes, Autoscaling("never", cluster_autoscaler=True, karpenter=True))
    signs = (Autoscaling("always"), Autoscaling(cluster_autoscaler=True), Autoscaling(karpenter=True))
    assert all(node_fit.may_be_made(FOUR, nodes, sign) for sign in signs)
    assert not any(node_fit.may_be_made(replace(FOUR, host="of-kueue"), nodes, sign) for sign in signs)


def term(*expressions: tuple[str, str, list[str]]) -> dict[str, Any]:
    return {"matchExpressions": [dict(zip(("key", "operator", "values"), one, strict=True)) for one in expressions]}


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}


ON_A, IN_B = (node_fit.HOSTNAME, "In", ["a", "c"]), ("zone", "In", ["b"])
NAMED: list[tuple[str, bool, dict[str, Any]]] = [
    ("by a selector", True, {"node_selector": {node_fit.HOSTNAME: "a"}}),
    ("by affinity", True, {"affinity": required(term(IN_B, ON_A))}),
    ("in each of its terms", True, {"affinity": required(term(ON_A), term(IN_B, ON_A))}),
    ("in one of two terms", False, {"affinity": required(term(ON_A), term(IN_B))}),
    ("as one to leave alone", False, {"affinity": required(term((node_fit.HOSTNAME, "NotIn", ["b"])))}),
    ("by another label", False, {"affinity": required(term(IN_B)), "node_selector": {"zone": "b"}}),
]


@pytest.mark.parametrize(("named", "pod"), [row[1:] for row in NAMED], ids=[row[0] for row in NAMED])
def test_no_node_is_made_for_a_job_that_names_the_hosts_that_it_takes(named: bool, pod: dict[str, Any]) -> None:
    asked = need(**pod)
    nodes = n.capacity(n.node("a", 4, labels={"zone": "b"}), n.foreign("a", gpus=4)).nodes_for(n.KEY, asked)
    signs = (Autoscaling(), Autoscaling(cluster_autoscaler=True), Autoscaling(karpenter=True))
    for there in (nodes, []):
        assert {node_fit.may_be_made(asked, there, sign) for sign in signs} == {not named}
        assert node_fit.may_be_made(asked, there, Autoscaling("always")), "the admin's word"


def hosts(*names: str) -> node_fit.Avoided:
    return tuple((node_fit.HOSTNAME, name) for name in names)


def test_hosts_that_could_take_the_servers_alone_are_named_and_with_karpenter_only_those_that_have_room_now() -> None:
    taken = (n.foreign("full", gpus=4), n.foreign("part", gpus=1))
    objects = (n.node("full", 4), n.node("part", 4), n.node("small", 2), *taken)
    nodes = n.capacity(*objects).nodes_for(n.KEY, FOUR)
    assert node_fit.half_rooms(FOUR, nodes, Autoscaling()) == hosts("full", "part")
    assert node_fit.half_rooms(FOUR, nodes, Autoscaling(karpenter=True)) == hosts("part")
    karpenter = n.node("other", 0, labels={"karpenter.sh/nodepool": "default"})
    pooled = n.capacity(*objects, karpenter).nodes_for(n.KEY, FOUR)
    assert node_fit.half_rooms(FOUR, pooled, Autoscaling()) == hosts("part")
    assert node_fit.half_rooms(need(), nodes, Autoscaling()) == ()


def test_with_karpenter_nodes_of_a_type_that_is_too_small_are_named_by_their_type() -> None:
    def typed(name: str, gpus: int, kind: str) -> Any:
        return n.node(name, gpus, labels={node_fit.INSTANCE_TYPE: kind})

    objects = (typed("a", 3, "small"), typed("b", 3, "small"), typed("c", 4, "large"), typed("d", 3, "large"))
    nodes = n.capacity(*objects, n.foreign("c", gpus=1)).nodes_for(n.KEY, FOUR)
    avoided = node_fit.half_rooms(FOUR, nodes, Autoscaling(karpenter=True))
    assert avoided == (*hosts("c", "d"), (node_fit.INSTANCE_TYPE, "small"))


def test_a_limit_stands_for_a_request_that_is_not_written() -> None:
    spec = {"containers": [{"resources": {"limits": {"cpu": "2", GPU: "1"}, "requests": {"cpu": "1"}}}]}
    assert node_fit.requests(spec) == {"cpu": 1, GPU: 1, "pods": 1}
