"""A large job is not passed for ever by smaller ones: after a while one node is kept for it."""

from dataclasses import replace

import pytest

from stage2_controller.cluster.capacity import Capacity
from stage2_controller.job import node_fit
from stage2_controller.job.key import Key
from stage2_controller.job.node_fit import Need, PodNeed
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
    made = account(time, n.node("a", 8), n.node("b", 8), n.foreign("a", gpus=7), n.foreign("b", gpus=2))
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
    made = account(time, n.node("a", 8), n.foreign("a", gpus=2))
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
    made = account(time, n.node("a", 8), n.foreign("a", gpus=2))
    made.wait(n.KEY, ALL)
    time.now = PATIENCE_S
    made.wait(n.KEY, ALL)
    assert place(made, n.OTHER, needs(1)) is None
    assert place(made, small(0), needs(1, priority=5)) == "a"
    assert place(made, small(1), replace(needs(1), host="a")) == "a"


def test_nothing_is_kept_for_a_job_that_no_node_could_ever_take() -> None:
    time = Time()
    made = account(time, n.node("a", 8), n.foreign("a", gpus=2))
    made.wait(n.KEY, needs(16))
    made.wait(n.OTHER, ALL)
    time.now = PATIENCE_S
    made.serve()
    assert place(made, small(0), needs(1)) is None, "the next that has waited has its turn"
    made.release(n.OTHER)
    assert place(made, small(0), needs(1)) == "a"


def test_of_several_the_highest_priority_comes_first_then_the_longest_wait() -> None:
    time = Time()
    filler = n.foreign("a", gpus=1)
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
