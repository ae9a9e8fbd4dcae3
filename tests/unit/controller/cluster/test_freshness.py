"""Watches that go deaf are noticed: what a list shows and no watch delivers is mended, and asked to the probe."""

from typing import Any

import pytest

from stage2_controller.cluster.watches import Freshness
from stage2_controller.spec import kinds, names
from stage2_controller.spec.names import Key
from stage2_controller.store import Store
from tests.unit.controller import nodes as n
from tests.unit.controller.cluster.test_store import KEY, seen, version
from tests.unit.controller.place.test_capacity import FOUR

KINDS = [resource.kind for resource in kinds.watched(kueue=False)]


class Lists:
    """The lists of an API server that holds `objects`."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (*KINDS, "Node")}
        self.tried: set[tuple[str, str | None]] = set()

    async def list(self, kind: str, namespace: str | None, *, labelled: bool) -> dict[str, Any]:
        return {"items": self.objects[kind], "metadata": {"resourceVersion": "100"}}

    async def try_list(self, kind: str, namespace: str | None) -> None:
        self.tried.add((kind, namespace))


class Stage:
    """A store, the lists beside it, and the keys that were put on the queue."""

    def __init__(self) -> None:
        self.lists = Lists()
        self.store = Store()
        self.asked: list[Key] = []
        self.account = n.capacity()
        self.freshness = Freshness(self.lists, self.store, self.asked.append, grace_s=0, capacity=self.account)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.mark.parametrize("namespaces", [(), ("a", "b")])
async def test_whoever_asks_for_the_lease_has_tried_each_list_that_a_leader_makes(namespaces: tuple[str, ...]) -> None:
    """The pods of all namespaces too, which take room on nodes, whatever namespaces are served."""
    lists = Lists()
    await Freshness(lists, Store(), lambda _: None, namespaces=namespaces, capacity=n.capacity()).try_lists()
    served = {(kind, namespace) for kind in KINDS for namespace in namespaces or (None,)}
    assert lists.tried == served | {("Node", None), ("Pod", None)}


async def test_it_fills_the_store_before_the_first_pass(stage: Stage) -> None:
    stage.lists.objects["Job"] = [seen("Job", "j", 5)]
    await stage.freshness.fill()
    assert version(stage.store, "Job", "j") == "5"


async def test_a_change_that_no_watch_delivered_is_mended_and_asks_for_a_pass(stage: Stage) -> None:
    stage.store.put("Job", seen("Job", "j", 5))
    stage.store.put("Pod", seen("Pod", "gone", 6))
    stage.lists.objects["Job"] = [seen("Job", "j", 7)]
    await stage.freshness.round()
    assert version(stage.store, "Job", "j") == "7"
    assert version(stage.store, "Pod", "gone") is None
    assert stage.asked == [KEY, KEY]


async def test_watches_that_deliver_are_fresh(stage: Stage) -> None:
    for count in range(5):
        body = seen(names.KIND, "job-3v1", count)
        stage.store.put(names.KIND, body)
        stage.lists.objects[names.KIND] = [body]
        await stage.freshness.round()
    assert stage.freshness.problem() is None
    assert stage.asked == []


async def test_watches_that_miss_changes_again_and_again_are_deaf(stage: Stage) -> None:
    for count in range(1, 4):
        assert stage.freshness.problem() is None
        stage.lists.objects[names.KIND] = [seen(names.KIND, "job-3v1", count)]
        await stage.freshness.round()
    assert "missed changes in 3 rounds" in str(stage.freshness.problem())


async def test_room_that_is_promised_to_jobs_that_do_not_exist_is_free_after_a_round(stage: Stage) -> None:
    there = seen(names.KIND, "job-3v1", 1)
    stage.store.put(names.KIND, there)
    stage.lists.objects |= {names.KIND: [there], "Node": [n.node(), n.node("b")]}
    stage.account.promise(KEY, FOUR, "node-a")
    stage.account.promise(n.OTHER, FOUR, "b")
    await stage.freshness.round()
    assert (stage.account.snapshot(KEY).promised, stage.account.snapshot(n.OTHER).promised) == ("node-a", None)
