"""The account of the nodes: no room is given twice, and what is freed goes to those who wait."""

import itertools
from dataclasses import replace

import pytest

from stage2_controller.job.names import Key
from stage2_controller.place import node_fit
from stage2_controller.place.capacity import LONGEST_PAUSE_S, PROMISE_S, Capacity
from stage2_controller.place.node_fit import Need
from tests.unit.controller import nodes as n


def free(made: Capacity, key: Key = n.OTHER, node: str = "node-a") -> float:
    (info,) = [info for info in n.seen(made, n.FOUR, key) if info.name == node]
    return info.free[n.GPU]


def test_promised_room_is_taken_before_pods_exist() -> None:
    made = n.capacity(n.node(gpus=8))
    made.promise(n.KEY, n.FOUR, "node-a")
    assert free(made) == 4
    assert free(made, n.KEY) == 8


def test_promised_job_pods_are_not_counted_twice() -> None:
    made = n.capacity(n.node(gpus=8), n.bound("rollout", 3))
    made.promise(n.KEY, n.FOUR, "node-a")
    assert free(made) == 4
    made.put("Pod", n.bound("learner", 1))
    assert free(made) == 4


def test_two_jobs_never_get_the_same_room() -> None:
    made = n.capacity(n.node("a", 4), n.node("b", 4))
    chosen = []
    for index in range(3):
        key = Key("team-a", f"job-{index}")
        node = node_fit.choose_node(n.FOUR, n.seen(made, n.FOUR, key))
        chosen.append(node)
        if node:
            made.promise(key, n.FOUR, node)
    assert chosen == ["a", "b", None]


def test_freed_room_goes_by_priority_then_arrival() -> None:
    made = n.capacity(n.node(gpus=8))
    filler = n.foreign(gpus=8, priority=100)
    made.put("Pod", filler)
    keys = [Key("team-a", name) for name in ("first", "second", "important", "large")]
    for key, priority in zip(keys, (0, 0, 7, 9), strict=True):
        pods = n.FOUR.pods * (4 if key.name == "large" else 1)
        made.wait(key, Need(pods, priority=priority, gpu_resource=n.GPU))
    assert made.serve() == []
    made.remove("Pod", filler)
    assert made.serve() == [keys[2], keys[0]]
    assert [*made._waiting] == [keys[1], keys[3]]


def test_promise_made_by_preemption_holds_room_against_other_jobs() -> None:
    strong = replace(n.FOUR, priority=10)
    made = n.capacity(n.node(), n.foreign(gpus=4))
    made.promise(n.KEY, strong, "node-a")
    assert node_fit.choose_node(strong, n.seen(made, strong)) == "node-a"
    assert node_fit.choose_node(strong, n.seen(made, strong, n.OTHER)) is None


def test_updated_promise_reserves_only_current_need() -> None:
    made = n.capacity(n.node(gpus=8))
    for need, left in ((n.FOUR, 4), (replace(n.FOUR, pods=n.FOUR.pods[1:]), 7)):
        made.promise(n.KEY, need, "node-a")
        assert free(made) == left


def test_host_bound_job_is_promised_only_that_host() -> None:
    filler = n.foreign("z", gpus=4)
    made = n.capacity(n.node("b"), n.node("z"), filler)
    made.wait(n.KEY, replace(n.FOUR, host="z"))
    made.wait(n.OTHER, replace(n.FOUR, host="z"))
    assert made.serve() == []
    made.remove("Pod", filler)
    assert made.serve() == [n.KEY]
    assert made.snapshot(n.KEY).promised == "z"


def test_waiting_job_is_woken_only_when_room_is_freed() -> None:
    reported: list[int] = []
    made = Capacity(lambda: reported.append(1))
    made.put("Node", n.node())
    filler = n.foreign(gpus=4)
    made.put("Pod", filler)
    assert reported == []
    made.wait(n.KEY, n.FOUR)
    made.put("Node", n.node())  # a heartbeat
    assert reported == []
    made.put("Pod", {**filler, "status": {"phase": "Succeeded"}})
    assert reported == [1]


def test_relist_removes_pods_and_nodes_deleted_while_watch_was_down() -> None:
    made = n.capacity(n.node(), n.node("gone"), n.foreign(gpus=2))
    for kind, present in (("Pod", ()), ("Node", ("uid-of-node-a",))):
        for body in made.vanished(kind, None, present, 100):
            made.observe(kind, {"type": "DELETED", "object": body})
    assert free(made) == 4
    assert [info.name for info in n.seen(made, n.FOUR)] == ["node-a"]


@pytest.mark.parametrize("order", list(itertools.permutations(["node", "pods", "promise"])), ids="-".join)
def test_deleted_node_is_forgotten_once_its_pods_and_promises_are_gone(order: tuple[str, ...]) -> None:
    pods = [n.bound("learner", 1, on="deleted"), n.foreign("deleted")]
    made = n.capacity(n.node(), n.node("deleted"), *pods)
    made.promise(n.KEY, n.FOUR, "deleted")
    free(made)
    assert "deleted" in made._states
    for gone in order:
        if gone == "node":
            made.remove("Node", n.node("deleted"))
        elif gone == "pods":
            for pod in pods:
                made.remove("Pod", pod)
        else:
            made.release(n.KEY)
        free(made)
    assert [[*kept] for kept in (made._nodes, made._states)] == [["node-a"]] * 2
    assert (made._pods, made._node_of, made._promises) == ({}, {}, {})
    assert made._freed_nodes <= {"node-a"}


def test_failed_pod_with_huge_gpu_request_gives_its_room_back() -> None:
    made = n.capacity(n.node(), n.foreign(gpus=3))
    absurd = n.foreign(gpus=9223372036854775807)
    made.put("Pod", absurd)
    assert free(made) < 0
    made.put("Pod", {**absurd, "status": {"phase": "Failed"}})
    assert free(made) == 1


def promised() -> tuple[Capacity, list[float], list[int]]:
    """An account with a promise that lasts for one more second, while another job waits; its clock, and its calls."""
    now, wakes = [0.0], list[int]()
    made = Capacity(lambda: wakes.append(1), clock=lambda: now[0])
    made.put("Node", n.node())
    made.promise(n.KEY, n.FOUR, "node-a")
    made.wait(n.OTHER, n.FOUR)
    now[0] += PROMISE_S - 1
    return made, now, wakes


def test_expired_promise_wakes_waiting_job_and_gives_it_room() -> None:
    made, now, wakes = promised()
    assert (made.snapshot(n.KEY).promised, made.serve()) == ("node-a", [])
    now[0] += 1
    assert made.snapshot(n.KEY).promised is None
    assert (wakes, made.serve(), made.snapshot(n.OTHER).promised) == ([1], [n.OTHER], "node-a")


def test_expired_promise_is_given_away_without_being_read_first() -> None:
    made, now, _ = promised()
    assert made.serve() == []
    now[0] += 1
    assert made.serve() == [n.OTHER]


def test_all_nodes_that_refused_job_are_remembered() -> None:
    now = [0.0]
    made = Capacity(clock=lambda: now[0])
    for name in ("a", "b", "c"):
        made.put("Node", n.node(name))
    for name in ("a", "b"):
        made.give_up(n.KEY, name)
        now[0] += LONGEST_PAUSE_S
    assert made.snapshot(n.KEY).refused == {"a", "b"}


def test_snapshot_does_not_change_with_later_updates() -> None:
    made = n.capacity(n.node(gpus=8))
    before = made.snapshot(n.OTHER)
    made.promise(n.KEY, n.FOUR, "node-a")
    made.put("Node", n.node("b"))
    (info,) = before.nodes_for(n.FOUR)
    assert info.free[n.GPU] == 8
    assert len(made.snapshot(n.OTHER).nodes_for(n.FOUR)) == 2


def test_renewed_promise_lasts_longer_and_wakes_nobody() -> None:
    made, now, wakes = promised()
    made.promise(n.KEY, n.FOUR, "node-a")
    now[0] += PROMISE_S - 1
    assert (made.snapshot(n.KEY).promised, wakes) == ("node-a", [])


def test_recreated_node_is_no_longer_marked_as_refusing_job() -> None:
    made = n.capacity(n.node())
    made.give_up(n.KEY, "node-a")
    assert [info.refused for info in n.seen(made, n.FOUR)] == [True]
    made.remove("Node", n.node())
    made.put("Node", n.node())
    assert [info.refused for info in n.seen(made, n.FOUR)] == [False]


@pytest.mark.parametrize("before", ["nobody's", "another's", "another role"])
def test_relabelled_pod_counts_for_its_current_job_and_role(before: str) -> None:
    pod = n.bound("learner", 0)
    first: dict[str, dict[str, object]] = {
        "nobody's": {"labels": {}, "annotations": {}},
        "another's": n.bound("learner", 0, job="other")["metadata"],
        "another role": n.bound("rollout", 0)["metadata"],
    }
    labels, annotations = first[before]["labels"], first[before]["annotations"]
    made = n.capacity(n.node())
    made.promise(n.KEY, n.FOUR, "node-a")
    made.put("Pod", {**pod, "metadata": {**pod["metadata"], "labels": labels, "annotations": annotations}})
    relabelled = {**pod, "metadata": {**pod["metadata"], "resourceVersion": "2"}}
    made.put("Pod", relabelled)
    assert free(made) == 1, "its learner is there, and takes nothing"
    made.remove("Pod", relabelled)
    assert free(made) == 0
    made.promise(n.OTHER, n.FOUR, "node-a")
    assert free(made, Key("team-a", "third")) == -4
