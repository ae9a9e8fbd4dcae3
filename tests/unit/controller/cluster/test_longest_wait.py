"""A large job is not passed for ever by smaller ones: after a while one node is kept for it."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.place import node_fit
from stage2_controller.place.capacity import Capacity
from stage2_controller.place.longest_wait import LOOKED_AT
from stage2_controller.place.node_fit import Autoscaling, Need, PodNeed
from stage2_controller.place.placement import NodeView
from stage2_controller.plan import plan
from stage2_controller.spec.key import Key
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n

GPU = "nvidia.com/gpu"
PATIENCE_S = 600.0


def needs(gpus: int, priority: int = 0) -> Need:
    return Need((PodNeed("learner", {GPU: gpus, "pods": 1}),), priority=priority, gpu_resource=GPU)


ALL, HALF = needs(8), needs(4)


class Time:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def account(time: Time, *bodies: n.Object, patience_s: float = PATIENCE_S) -> Capacity:
    made = Capacity(clock=time, patience_s=patience_s)
    for body in bodies:
        made.put("Pod" if "containers" in body["spec"] else "Node", body)
    return made


def job_pod(on: str, gpus: int) -> n.Object:
    """A pod of some other job, which ends some day."""
    return n.bound("learner", gpus, on=on, job="runs")


def small(index: int) -> Key:
    return Key("team-b", f"small-{index}")


def place(made: Capacity, key: Key, need: Need) -> str | None:
    """What a pass over the job does."""
    node = node_fit.choose_node(need, made.nodes_for(key, need))
    if node:
        made.promise(key, need, node)
    else:
        made.wait(key, need)
    return node


def stream(made: Capacity, time: Time, hours: float) -> float | None:
    """Let small jobs of twelve minutes come, one every six: two always run. The seconds until the large one starts."""
    started, index = time.now, 0
    place(made, small(0), HALF)
    place(made, n.KEY, ALL)
    while time.now < started + hours * 3600:
        index += 1
        time.now += 360
        place(made, small(index), HALF)
        made.release(small(index - 2))
        made.serve()
        if place(made, n.KEY, ALL):
            return time.now - started
    return None


@pytest.mark.parametrize(("patience_s", "starts"), [(0.0, False), (PATIENCE_S, True)], ids=["without", "with"])
def test_a_large_job_starts_although_smaller_ones_come_all_the_time(patience_s: float, *, starts: bool) -> None:
    time = Time()
    waited = stream(account(time, n.node(gpus=8), patience_s=patience_s), time, hours=24)
    assert (waited is not None) is starts
    if waited is not None:
        assert waited <= PATIENCE_S + 720 + 360, "patience, the longest job that ran, and a beat"


def test_the_node_that_comes_closest_is_kept_and_the_others_are_not() -> None:
    time = Time()
    made = account(time, n.node("a", 8), n.node("b", 8), job_pod("a", 7), job_pod("b", 2))
    made.wait(n.KEY, ALL)
    time.now = PATIENCE_S
    made.wait(n.KEY, ALL)
    assert [info.name for info in made.nodes_for(n.OTHER, needs(1)) if info.kept] == ["b"]
    assert [info.name for info in made.nodes_for(n.KEY, ALL) if info.kept] == []
    assert place(made, n.OTHER, needs(1)) == "a"
    assert place(made, small(0), needs(1)) is None
    assert "is kept for a job that has waited for longer" in node_fit.why_none_fits(
        needs(1), [info for info in made.nodes_for(small(0), needs(1)) if info.kept]
    )


@pytest.mark.parametrize("ends", ["release", "promise"])
def test_the_node_is_everybodys_again_when_the_job_waits_no_more(ends: str) -> None:
    time, told = Time(), []
    made = account(time, n.node("a", 8), job_pod("a", 2))
    made.freed = lambda: told.append(1)
    made.wait(n.KEY, ALL)
    time.now = PATIENCE_S
    made.wait(n.KEY, ALL)
    assert place(made, n.OTHER, HALF) is None
    told.clear()
    made.release(n.KEY) if ends == "release" else made.promise(n.KEY, needs(1), "a")
    assert told, "who waits is told"
    assert made.serve() == [n.OTHER]


def test_a_higher_priority_and_a_host_that_kueue_assigned_are_not_kept_out() -> None:
    time = Time()
    made = account(time, n.node("a", 8), job_pod("a", 2))
    made.wait(n.KEY, ALL)
    time.now = PATIENCE_S
    made.wait(n.KEY, ALL)
    assert place(made, n.OTHER, needs(1)) is None
    assert place(made, small(0), needs(1, priority=5)) == "a"
    assert place(made, small(1), replace(needs(1), host="a")) == "a"


def test_nothing_is_kept_for_a_job_that_no_node_could_ever_take() -> None:
    time = Time()
    made = account(time, n.node("a", 8), job_pod("a", 2))
    made.wait(n.KEY, needs(16))
    made.wait(n.OTHER, ALL)
    time.now = PATIENCE_S
    made.serve()
    assert place(made, small(0), needs(1)) is None, "the next that has waited has its turn"
    made.release(n.OTHER)
    assert place(made, small(0), needs(1)) == "a"


@pytest.mark.parametrize("foreign", [{"gpus": 1}, {"cpu": "1"}], ids=["gpu", "cpu"])
def test_no_node_is_kept_where_what_is_missing_is_not_held_by_jobs(foreign: dict[str, Any]) -> None:
    """An inference server, or a DaemonSet, never ends: the rest of the node would stand idle for as long."""
    time = Time()
    made = account(time, n.node("a", 8), n.foreign("a", **foreign))
    whole = Need((PodNeed("learner", {GPU: 8, "cpu": 32, "pods": 1}),), gpu_resource=GPU)
    made.wait(n.KEY, whole)
    time.now = 1_000_000
    made.wait(n.KEY, whole)
    made.serve()
    assert place(made, n.OTHER, needs(1)) == "a"


def test_room_that_is_promised_to_another_job_is_freed_some_day_too() -> None:
    time = Time()
    made = account(time, n.node("a", 8))
    made.promise(small(0), HALF, "a")
    made.wait(n.KEY, ALL)
    time.now = PATIENCE_S
    made.wait(n.KEY, ALL)
    assert place(made, n.OTHER, needs(1)) is None


def test_jobs_that_no_node_takes_do_not_take_the_turn_of_one_behind_them() -> None:
    time = Time()
    made = account(time, n.node("a", 8), job_pod("a", 2))
    for index in range(20):
        made.wait(Key("x", f"hopeless-{index}"), needs(16 + index))
    made.wait(n.KEY, ALL)
    time.now = PATIENCE_S
    for _ in range(20 // LOOKED_AT + 1):
        made.serve()
    for _ in range(3):
        assert place(made, small(0), needs(1)) is None
        made.serve()


def test_a_job_without_gpus_keeps_no_node() -> None:
    time = Time()
    cores = Need((PodNeed("learner", {"cpu": 30, "pods": 1}),), gpu_resource=GPU)
    busy = job_pod("a", 0)
    busy["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "4"}
    made = account(time, n.node("a", 8), busy)
    assert place(made, n.KEY, cores) is None
    time.now = PATIENCE_S
    assert place(made, n.KEY, cores) is None
    assert place(made, n.OTHER, ALL) == "a"


def test_pods_that_the_scheduler_places_leave_the_kept_node_alone() -> None:
    time = Time()
    pooled = n.node("a", 8, labels={"karpenter.sh/nodepool": "p"})
    made = account(time, pooled, job_pod("a", 8))
    made.wait(n.KEY, ALL)
    time.now = PATIENCE_S
    made.wait(n.KEY, ALL)
    two = Need((PodNeed("rollout", {GPU: 2, "pods": 1}), PodNeed("learner", {GPU: 2, "pods": 1})), gpu_resource=GPU)
    for need in (two, needs(1)):
        assert node_fit.half_rooms(need, made.nodes_for(n.OTHER, need), Autoscaling()) == ((node_fit.HOSTNAME, "a"),)


def test_a_job_that_only_the_kept_node_would_take_makes_no_pods() -> None:
    time = Time()
    made = account(time, n.node("a", 8), job_pod("a", 2))
    made.wait(n.KEY, ALL)
    time.now = PATIENCE_S
    made.wait(n.KEY, ALL)
    raw = b.job(config=b.COLOCATE, rollout={"servers": 0}, learner={"gpus": 2})
    view = NodeView(made, n.OTHER)
    planned = plan(raw, b.NOTHING, settings=b.SETTINGS, now=b.NOW, new_credentials=b.new_credentials, nodes=view)
    assert b.kinds(planned) == []
    made.put(
        "Pod", job_pod("a", 6)
    )  # room may come elsewhere: an autoscaler has to see a pod, which no room here tempts
    planned = plan(raw, b.NOTHING, settings=b.SETTINGS, now=b.NOW, new_credentials=b.new_credentials, nodes=view)
    affinity = str(b.child(planned, "Job")["spec"]["template"]["spec"]["affinity"])
    assert "'NotIn', 'values': ['a']" in affinity


def test_of_several_the_highest_priority_comes_first_then_the_longest_wait() -> None:
    time = Time()
    filler = job_pod("a", 1)
    made = account(time, n.node("a", 8), filler)
    keys = [Key("team-a", name) for name in ("first", "second", "important")]
    for key, priority in zip(keys, (0, 0, 7), strict=True):
        time.now += 1
        made.wait(key, needs(8, priority))
    time.now += PATIENCE_S
    made.remove("Pod", filler)
    order = []
    for _ in keys:
        (key,) = made.serve()
        order.append(key)
        made.release(key)
    assert order == [keys[2], keys[0], keys[1]]
