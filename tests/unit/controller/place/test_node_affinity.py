"""Affinity to nodes: the controller chooses as the scheduler would, and pods keep it on the node that was chosen."""

import copy
from typing import Any

import pytest

from stage2_controller.children.build import build, parse
from stage2_controller.place import node_fit
from stage2_controller.place.node_fit import PREFERRED, REQUIRED, Need, PodNeed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n

GPU = "nvidia.com/gpu"


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
def test_a_requirement_means_what_it_means_to_the_scheduler(one: Any, labels: dict[str, str], taken: bool) -> None:
    assert node_fit.affinity_takes(required([one]), labels) is taken


def test_one_term_has_to_be_met_and_that_as_a_whole() -> None:
    affinity = required([H100, expression("zone", "NotIn", "b")], [expression("pool", "Exists")])
    assert node_fit.affinity_takes(affinity, {"gpu": "h100", "zone": "a"})
    assert not node_fit.affinity_takes(affinity, {"gpu": "h100", "zone": "b"})
    assert node_fit.affinity_takes(affinity, {"pool": "mine", "zone": "b"})


def need(affinity: dict[str, Any]) -> Need:
    return Need((PodNeed("learner", {GPU: 1, "pods": 1}, affinity=affinity),), gpu_resource=GPU)


def test_a_node_outside_is_not_chosen_and_the_reason_is_reported() -> None:
    asked = need(required([H100, expression("zone", "NotIn", "b")], [expression("pool", "Exists")]))
    infos = n.seen(n.capacity(n.node("a", labels={"gpu": "a100"})), asked)
    assert node_fit.choose_node(asked, infos) is None
    reported = node_fit.why_none_fits(asked, infos)
    assert "a is none of gpu In (h100, h200), zone NotIn (b) or pool Exists (spec.placement.affinity)" in reported


def test_of_nodes_with_room_the_preferred_one_is_taken_before_the_fullest() -> None:
    asked = need({PREFERRED: [preferred(10, H100), preferred(5, expression("zone", "In", "a"))]})
    nodes = [n.node("full", 1), n.node("near", 2, labels={"zone": "a"}), n.node("best", 8, labels={"gpu": "h100"})]
    infos = n.seen(n.capacity(*nodes), asked)
    assert node_fit.choose_node(asked, infos) == "best"
    assert node_fit.choose_node(asked, infos[:2]) == "near"


AFFINITY = {"nodeAffinity": {**required([H100], [expression("pool", "Exists")]), PREFERRED: [preferred(1, H100)]}}


def affinity_of(manifest: Any) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]["affinity"]
    return found


def made(kind: str, **choice: Any) -> Any:
    raw = b.job(placement={"affinity": copy.deepcopy(AFFINITY)})
    children = build(parse(raw, b.SETTINGS), b.SETTINGS, **choice)
    return next(one for one in children if one["kind"] == kind)


def test_pods_that_the_scheduler_places_have_it_and_the_learner_follows_the_servers_too() -> None:
    assert affinity_of(made("Deployment")) == AFFINITY
    assert affinity_of(made("Job"))["nodeAffinity"] == AFFINITY["nodeAffinity"]
    assert "podAffinity" in affinity_of(made("Job"))


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_on_a_chosen_node_every_term_is_narrowed_to_it(kind: str) -> None:
    affinity = affinity_of(made(kind, node="node-a"))
    assert affinity.keys() == {"nodeAffinity"}
    here = [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]
    terms = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    own = AFFINITY["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert terms == [{**term, "matchFields": here} for term in own]


def test_nodes_that_are_left_alone_are_so_in_every_term() -> None:
    avoided = ((node_fit.HOSTNAME, "a"), (node_fit.HOSTNAME, "b"), (node_fit.INSTANCE_TYPE, "small"))
    terms = affinity_of(made("Deployment", avoid=avoided))["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    none = [expression(node_fit.HOSTNAME, "NotIn", "a", "b"), expression(node_fit.INSTANCE_TYPE, "NotIn", "small")]
    assert [term["matchExpressions"] for term in terms] == [[H100, *none], [expression("pool", "Exists"), *none]]
