"""The account of the nodes: no room is given twice, and what is freed goes to those who wait."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.place import capacity, node_fit
from stage2_controller.place.capacity import NODES_A_CALL, Capacity
from stage2_controller.place.exclusions import EXCLUDED_S
from stage2_controller.place.node_fit import Need, PodNeed
from stage2_controller.spec.key import Key
from tests.unit.controller import nodes as n

GPU = "nvidia.com/gpu"
FOUR = Need((PodNeed("rollout", {GPU: 3, "pods": 1}), PodNeed("learner", {GPU: 1, "pods": 1})), gpu_resource=GPU)


def free(made: Capacity, key: Key = n.OTHER, node: str = "node-a") -> float:
    (info,) = [info for info in made.nodes_for(key, FOUR) if info.name == node]
    return info.free[GPU]


def test_a_promise_takes_room_before_any_pod_exists() -> None:
    made = n.capacity(n.node(gpus=8))
    made.promise(n.KEY, FOUR, "node-a")
    assert free(made) == 4
    assert free(made, n.KEY) == 8


def test_pods_of_a_promised_job_are_not_counted_twice() -> None:
    made = n.capacity(n.node(gpus=8), n.bound("rollout", 3))
    made.promise(n.KEY, FOUR, "node-a")
    assert free(made) == 4
    made.put("Pod", n.bound("learner", 1))
    assert free(made) == 4


def test_two_jobs_never_get_the_same_room() -> None:
    made = n.capacity(n.node("a", 4), n.node("b", 4))
    chosen = []
    for index in range(3):
        key = Key("team-a", f"job-{index}")
        node = node_fit.choose_node(FOUR, made.nodes_for(key, FOUR))
        chosen.append(node)
        if node:
            made.promise(key, FOUR, node)
    assert chosen == ["a", "b", None]


def test_freed_room_goes_to_the_highest_priority_then_to_the_first_that_came() -> None:
    made = n.capacity(n.node(gpus=8))
    filler = n.foreign(gpus=8, priority=100)
    made.put("Pod", filler)
    keys = [Key("team-a", name) for name in ("first", "second", "important")]
    for key, priority in zip(keys, (0, 0, 7), strict=True):
        made.wait(key, Need(FOUR.pods, priority=priority, gpu_resource=GPU))
    assert made.serve() == []
    made.remove("Pod", filler)
    assert made.serve() == [keys[2], keys[0]]
    assert made.waiting() == 1


def test_a_job_that_is_tied_to_a_host_is_promised_no_other() -> None:
    filler = n.foreign("z", gpus=4)
    made = n.capacity(n.node("b"), n.node("z"), filler)
    made.wait(n.KEY, replace(FOUR, host="z"))
    made.wait(n.OTHER, replace(FOUR, host="z"))
    assert made.serve() == []
    made.remove("Pod", filler)
    assert made.serve() == [n.KEY]
    assert made.promised(n.KEY) == "z"


def test_who_waits_is_told_when_something_is_freed_and_only_then() -> None:
    told: list[int] = []
    made = Capacity(lambda: told.append(1))
    made.put("Node", n.node())
    filler = n.foreign(gpus=4)
    made.put("Pod", filler)
    assert told == []
    made.wait(n.KEY, FOUR)
    made.put("Node", n.node())  # a heartbeat
    assert told == []
    made.put("Pod", {**filler, "status": {"phase": "Succeeded"}})
    assert told == [1]


def test_a_list_corrects_what_the_watch_missed() -> None:
    made = n.capacity(n.node(), n.node("gone"), n.foreign(gpus=2))
    made.retain_pods(set(), 10)
    made.retain_nodes([n.node()], 10)
    assert free(made) == 4
    assert [info.name for info in made.nodes_for(n.KEY, FOUR)] == ["node-a"]


def at(version: int, node: Any) -> Any:
    """The same object as it was at another resource version."""
    return {**node, "metadata": {**node["metadata"], "resourceVersion": str(version)}}


def test_a_list_of_nodes_does_not_take_back_what_the_watch_has_told_since() -> None:
    made = n.capacity(at(1, n.node()), at(1, n.node("deleted")))
    made.put("Node", at(12, n.node(unschedulable=True)))
    made.put("Node", at(13, n.node("new")))
    made.remove("Node", at(14, n.node("deleted")))
    made.retain_nodes([at(1, n.node()), at(1, n.node("deleted"))], 11)
    known = {info.name: info.cordoned for info in made.nodes_for(n.KEY, FOUR)}
    assert known == {"node-a": True, "new": False}
    made.retain_nodes([at(12, n.node(unschedulable=True))], 20)
    assert [info.name for info in made.nodes_for(n.KEY, FOUR)] == ["node-a"]
    made.put("Node", at(21, n.node("deleted")))  # one that has come again
    made.remove("Node", at(14, n.node("deleted")))  # told late
    assert [info.name for info in made.nodes_for(n.KEY, FOUR)] == ["node-a", "deleted"]


@pytest.mark.parametrize("order", list(itertools.permutations(["node", "pods", "promise"])), ids="-".join)
def test_names_of_nodes_that_are_gone_are_not_remembered_for_ever(order: tuple[str, ...]) -> None:
    pods = [n.bound("learner", 1, on="deleted"), n.foreign("deleted")]
    made = n.capacity(at(1, n.node()), at(1, n.node("deleted")), *pods)
    made.promise(n.KEY, FOUR, "deleted")
    free(made)
    assert "deleted" in made._free
    for gone in order:
        if gone == "node":
            made.remove("Node", at(14, n.node("deleted")))
        elif gone == "pods":
            for pod in pods:
                made.remove("Pod", pod)
        else:
            made.release(n.KEY)
        free(made)
    made.retain_nodes([n.node()], 20)
    by_node = (made._nodes, made._node_versions, made._reservations, made._free, made._pods)
    assert [[*kept] for kept in by_node] == [["node-a"]] * 4 + [[]]
    assert (made._bound, made._where, made._promises) == ({}, {}, {})


def test_a_pod_that_asks_for_an_absurd_number_and_is_refused_leaves_the_account_as_it_was() -> None:
    made = n.capacity(n.node(), n.foreign(gpus=3))
    absurd = n.foreign(gpus=9223372036854775807)
    made.put("Pod", absurd)
    assert free(made) < 0
    made.put("Pod", {**absurd, "status": {"phase": "Failed"}})
    assert free(made) == 1


def test_nothing_is_kept_for_jobs_that_do_not_exist() -> None:
    made = n.capacity(n.node(), n.node("b"))
    made.promise(n.KEY, FOUR, "node-a")
    made.promise(n.OTHER, FOUR, "b")
    full = Key("team-a", "full")
    made.wait(full, FOUR)
    made.exclude(Key("team-a", "refused"), "b")
    made.retain_jobs({n.KEY})
    assert (made.promised(n.KEY), made.promised(n.OTHER), made.waiting()) == ("node-a", None, 0)
    assert made.excluded(Key("team-a", "refused")) == []


def test_a_node_that_the_scheduler_refused_is_left_alone_for_a_while() -> None:
    now = [0.0]
    made = Capacity(clock=lambda: now[0])
    made.put("Node", n.node())
    made.exclude(n.KEY, "node-a")
    assert node_fit.choose_node(FOUR, made.nodes_for(n.KEY, FOUR)) is None
    assert node_fit.choose_node(FOUR, made.nodes_for(n.OTHER, FOUR)) == "node-a"
    now[0] = EXCLUDED_S + 1
    assert node_fit.choose_node(FOUR, made.nodes_for(n.KEY, FOUR)) == "node-a"


def test_a_node_that_was_full_when_the_scheduler_refused_it_is_chosen_as_soon_as_it_has_room() -> None:
    filler = n.foreign(gpus=2)
    made = n.capacity(n.node(), filler)
    assert made.sees_why(n.KEY, FOUR, "node-a")
    assert node_fit.choose_node(FOUR, made.nodes_for(n.KEY, FOUR)) is None
    made.remove("Pod", filler)
    assert node_fit.choose_node(FOUR, made.nodes_for(n.KEY, FOUR)) == "node-a"


def test_a_node_that_was_cordoned_when_the_scheduler_refused_it_is_chosen_as_soon_as_it_is_not() -> None:
    made = n.capacity(n.node(unschedulable=True))
    assert made.sees_why(n.KEY, FOUR, "node-a")
    made.put("Node", n.node())
    assert not made.sees_why(n.KEY, FOUR, "node-a")
    assert node_fit.choose_node(FOUR, made.nodes_for(n.KEY, FOUR)) == "node-a"


def test_a_node_on_which_one_pod_of_the_job_stands_is_not_full_because_of_it() -> None:
    made = n.capacity(n.node(), n.bound("learner", 1))
    made.promise(n.KEY, FOUR, "node-a")
    assert not made.sees_why(n.KEY, FOUR, "node-a")


def test_that_a_node_was_refused_before_does_not_tell_why() -> None:
    made = n.capacity(n.node())
    made.exclude(n.KEY, "node-a")
    assert node_fit.choose_node(FOUR, made.nodes_for(n.KEY, FOUR)) is None
    assert not made.sees_why(n.KEY, FOUR, "node-a")


def test_a_volume_of_another_zone_rules_out_all_nodes_of_this_one() -> None:
    zoned = [n.node(name, labels={"topology.kubernetes.io/zone": name[0]}) for name in ("a1", "a2", "b1")]
    made = n.capacity(*zoned, n.node("c"))
    made.exclude(n.KEY, "a1", zone=True)
    assert [info.name for info in made.nodes_for(n.KEY, FOUR) if info.excluded] == ["a1", "a2"]
    made.exclude(n.KEY, "c", zone=True)
    assert [info.name for info in made.nodes_for(n.KEY, FOUR) if info.excluded] == ["a1", "a2", "c"]


def test_where_only_one_of_many_nodes_can_take_the_job_its_turn_comes() -> None:
    now, tried = [0.0], []
    made = Capacity(clock=lambda: now[0])
    for index in range(60):
        made.put("Node", n.node(f"node-{index:02}"))
    for _ in range(200):
        node = node_fit.choose_node(FOUR, made.nodes_for(n.KEY, FOUR))
        if node:
            tried.append(node)
            made.exclude(n.KEY, node)
        now[0] += 15  # the time that one refusal takes
    assert set(tried) == {f"node-{index:02}" for index in range(60)}
    made.release(n.KEY)
    assert node_fit.choose_node(FOUR, made.nodes_for(n.KEY, FOUR)) == "node-00"


def test_very_many_that_wait_for_different_things_are_looked_at_a_part_at_a_time() -> None:
    """A tenant may send a thousand jobs of a thousand sizes: nothing else would be done meanwhile."""
    asked: list[int] = []
    made = Capacity(lambda: asked.append(1), clock=lambda: 0.0)
    for index in range(NODES_A_CALL // 10):
        made.put("Node", n.node(f"node-{index:03}"))
    sizes = [Need((PodNeed("learner", {GPU: 5 + index, "pods": 1}),), gpu_resource=GPU) for index in range(25)]
    for index, need in enumerate(sizes):
        made.wait(Key("team-x", f"x-{index}"), need)
    made.wait(n.KEY, FOUR)
    calls = []
    for _ in range(3):
        asked.clear()
        calls.append((made.serve(), bool(asked)))
    assert calls == [([], True), ([], True), ([n.KEY], False)]


def test_what_is_freed_while_a_part_of_those_that_wait_was_looked_at_is_for_all_of_them() -> None:
    asked: list[int] = []
    filler = n.foreign("node-000", gpus=4)
    made = Capacity(lambda: asked.append(1), clock=lambda: 0.0)
    for index in range(NODES_A_CALL):
        made.put("Node", n.node(f"node-{index:03}", gpus=4 if index == 0 else 0))
    made.put("Pod", filler)
    made.wait(n.KEY, FOUR)
    made.wait(n.OTHER, Need((PodNeed("learner", {GPU: 1, "pods": 1}),), gpu_resource=GPU))
    assert made.serve() == []
    made.remove("Pod", filler)
    asked.clear()
    assert made.serve() == [n.OTHER]
    assert asked, "the turn begins anew"
    made.release(n.OTHER)
    assert made.serve() == [n.KEY]


def test_room_that_is_freed_within_a_turn_goes_to_the_higher_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "NODES_A_CALL", 1)
    filler = n.foreign(gpus=4, priority=100)
    made = n.capacity(n.node(), filler)
    made.wait(n.OTHER, Need((PodNeed("learner", {GPU: 3, "pods": 1}),), gpu_resource=GPU))
    made.wait(n.KEY, replace(FOUR, priority=7))
    assert made.serve() == []
    made.remove("Pod", filler)
    assert made.serve() == [n.KEY]


def test_an_older_state_of_a_pod_does_not_replace_a_newer_one() -> None:
    made = n.capacity(n.node())
    pod = n.foreign(gpus=2)
    made.put("Pod", {**pod, "metadata": {**pod["metadata"], "resourceVersion": "9"}})
    made.put("Pod", {**n.foreign(gpus=1), "metadata": pod["metadata"]})
    assert free(made) == 2


@pytest.mark.parametrize("before", ["nobody's", "another's", "another role"])
def test_a_pod_that_is_relabelled_counts_as_what_it_is_now(before: str) -> None:
    pod = n.bound("learner", 0)
    first: dict[str, dict[str, object]] = {
        "nobody's": {"labels": {}, "annotations": {}},
        "another's": n.bound("learner", 0, job="other")["metadata"],
        "another role": n.bound("rollout", 0)["metadata"],
    }
    labels, annotations = first[before]["labels"], first[before]["annotations"]
    made = n.capacity(n.node())
    made.promise(n.KEY, FOUR, "node-a")
    made.put("Pod", {**pod, "metadata": {**pod["metadata"], "labels": labels, "annotations": annotations}})
    relabelled = {**pod, "metadata": {**pod["metadata"], "resourceVersion": "2"}}
    made.put("Pod", relabelled)
    assert free(made) == 1, "its learner is there, and takes nothing"
    made.remove("Pod", relabelled)
    assert free(made) == 0
    made.promise(n.OTHER, FOUR, "node-a")
    assert free(made, Key("team-a", "third")) == -4
