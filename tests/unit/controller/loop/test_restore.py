"""A new leader enters the places of the jobs that have one, before its first pass gives away what is free."""

from typing import Any, cast

import pytest

from stage2_controller.cluster.progress import ProgressPolls, ProgressReader
from stage2_controller.metrics import Metrics
from stage2_controller.place.capacity import Capacity
from stage2_controller.reconcile import Reconciler
from stage2_controller.spec import names
from stage2_controller.spec.names import Key
from stage2_controller.store import Store
from stage2_controller.work_queue import RetryLater
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.loop.test_reconcile import KEY, WATCHED, Server
from tests.unit.controller.place.test_capacity import free


def _leader(server: Server, store: Store) -> tuple[Reconciler, Capacity]:
    account = n.capacity(n.node(gpus=8))
    progress = ProgressPolls(ProgressReader(), lambda key: None, interval_s=b.SETTINGS.progress_s)
    metrics, api = Metrics(lambda: store.known(names.KIND)), cast("Any", server)
    made = Reconciler(api, store, progress, b.SETTINGS, metrics=metrics, capacity=account, clock=lambda: b.NOW)
    return made, account


async def _placed() -> tuple[Server, Store]:
    """A job that one leader has placed, as the watches tell it to the next: its pods are not bound yet."""
    server, store = Server(), Store()
    store.put(names.KIND, server.put(b.job()))
    first, account = _leader(server, store)
    await first(KEY)
    assert account.promised(KEY) == b.NODE
    told = Store()
    for (kind, _), body in server.objects.items():
        if kind in WATCHED:  # items of a list have no kind
            told.put(kind, {key: value for key, value in body.items() if key not in ("apiVersion", "kind")})
    return server, told


async def test_the_place_of_a_job_is_kept_for_it() -> None:
    server, told = await _placed()
    again, account = _leader(server, told)
    again.restore()
    assert (account.promised(KEY), free(account)) == (b.NODE, 4)


async def test_a_waiting_job_that_is_edited_into_a_wrong_one_waits_for_nothing() -> None:
    server, store = Server(), Store()
    leader, account = _leader(server, store)
    account.put("Pod", n.foreign(gpus=8))
    store.put(names.KIND, server.put(b.job()))
    await leader(KEY)
    assert account.waiting() == 1
    there = server.objects[names.KIND, KEY.name]
    store.put(names.KIND, server.put({**there, "spec": {"config": 3}}, generation=7))
    await leader(KEY)
    assert account.waiting() == 0


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_a_job_that_has_ended_keeps_no_place(phase: str) -> None:
    server, told = await _placed()
    at = "2026-01-01T00:00:00Z"
    outcome = {"type": phase, "status": "True", "reason": "x", "message": "x", "lastTransitionTime": at}
    ended = {**server.objects[names.KIND, KEY.name], "status": {"phase": phase, "conditions": [outcome]}}
    told.put(names.KIND, {**ended, "metadata": {**ended["metadata"], "resourceVersion": "999"}})
    again, account = _leader(server, told)
    again.restore()
    assert account.promised(KEY) is None


async def test_the_place_of_a_job_whose_spec_cannot_be_read_any_more_is_kept_too() -> None:
    server, told = await _placed()
    broken = {**server.objects[names.KIND, KEY.name], "spec": {"config": 3}}
    told.put(names.KIND, {**broken, "metadata": {**broken["metadata"], "generation": 7, "resourceVersion": "999"}})
    again, account = _leader(server, told)
    again.restore()
    assert (account.promised(KEY), free(account)) == (b.NODE, 4)


@pytest.mark.parametrize("kind", ["ConfigMap", "Job"])
async def test_a_job_whose_children_are_refused_keeps_no_room_from_others(kind: str) -> None:
    server, store = Server(), Store()
    leader, account = _leader(server, store)
    server.refused = {kind: "exceeded quota: objects"}
    store.put(names.KIND, server.put(b.job()))
    with pytest.raises(RetryLater):
        await leader(KEY)
    assert account.promised(KEY) is None
    server.refused.clear()
    await leader(KEY)
    assert account.promised(KEY) == b.NODE


async def test_who_came_first_is_first_also_when_another_leader_looks_at_others_before() -> None:
    """A list has jobs in the order of their names."""
    server, store, keys = Server(), Store(), [Key("team-a", name) for name in ("a-late", "z-early")]
    leader, account = _leader(server, store)
    filler = n.foreign(gpus=8)
    account.put("Pod", filler)
    for key, at in zip(keys, ("2026-01-02T00:00:09Z", "2026-01-02T00:00:08Z"), strict=True):
        store.put(names.KIND, server.put({**b.job(key.name), "status": {"startTime": at, "phase": "Pending"}}))
        await leader(key)
    account.put("Pod", n.foreign(gpus=4))
    account.remove("Pod", filler)
    assert account.serve() == [keys[1]]
