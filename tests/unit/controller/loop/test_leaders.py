"""Passes of leaders: jobs that change during a pass, places that a new leader restores, pods that are missing."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.job.names import Key
from stage2_controller.loop.reconcile import Reconciler
from stage2_controller.loop.work_queue import RetryLater
from stage2_controller.place.binding import UNMADE_S
from stage2_controller.place.capacity import Capacity
from stage2_controller.state import conditions, reasons
from stage2_controller.state.conditions import timestamp
from stage2_controller.state.store import Store
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.fake_server import KEY, Object, Server, reconciler


class Interrupted(Server):
    """The same server, where something happens once while a request is under way."""

    while_reading: Callable[[], None] = staticmethod(lambda: None)
    while_telling: Callable[[], None] = staticmethod(lambda: None)

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        self.while_reading()
        return await super().get(kind, str(namespace), name)

    async def apply_status(self, job: Any, status: Any) -> Object | None:
        written = await super().apply_status(job, status)
        self.while_telling()
        return written


class Stage:
    """A job on a node that has room for it, and the leader that is to place it."""

    def __init__(self) -> None:
        self.server, self.store = Interrupted(), Store()
        self.account: Capacity = n.capacity(n.node())
        self.store.put(names.KIND, self.server.put(b.job(placement={"priorityClassName": "high"})))
        self.leader = reconciler(self.server, self.store, capacity=self.account)

    def deleted(self) -> None:
        """The job goes, and the watch tells so."""
        self.store.remove(names.KIND, self.server.objects[names.KIND, KEY.name])
        self.leader.forget(KEY)

    def applied_anew(self) -> None:
        """Another job takes the name."""
        self.deleted()
        self.store.put(names.KIND, self.server.put(b.job(), uid="uid-of-the-next"))

    def deleted_in_the_foreground(self) -> None:
        """The job waits for its children to go."""
        there = self.server.objects[names.KIND, KEY.name]
        self.store.put(names.KIND, self.server.put(there, deletionTimestamp="2026-01-02T03:04:05Z"))


@pytest.mark.parametrize("happens", ["deleted", "applied_anew", "deleted_in_the_foreground"])
async def test_job_deleted_during_pass_gets_no_node_and_no_children(happens: str) -> None:
    stage = Stage()
    stage.server.while_reading = getattr(stage, happens)
    assert await stage.leader(KEY) is None
    assert stage.account.snapshot(KEY).promised is None
    assert stage.server.written() == []
    assert ("apply", "status") not in stage.server.requests


async def test_job_deleted_during_status_write_does_not_return_to_store() -> None:
    stage = Stage()
    stage.server.while_telling = stage.deleted
    await stage.leader(KEY)
    assert stage.store.one(names.KIND, KEY, KEY.name) is None
    assert stage.account.snapshot(KEY).promised is None


def _leader(server: Server, store: Store) -> tuple[Reconciler, Capacity]:
    account = n.capacity(n.node(gpus=8))
    return reconciler(server, store, capacity=account), account


async def test_waiting_job_edited_to_invalid_spec_leaves_waiting_list() -> None:
    server, store = Server(), Store()
    leader, account = _leader(server, store)
    account.put("Pod", n.foreign(gpus=8))
    store.put(names.KIND, server.put(b.job()))
    await leader(KEY)
    assert [*account._waiting] == [KEY]
    there = server.objects[names.KIND, KEY.name]
    store.put(names.KIND, server.put({**there, "spec": {"config": 3}}, generation=7))
    await leader(KEY)
    assert [*account._waiting] == []


@pytest.mark.parametrize("kind", ["ConfigMap", "Job"])
async def test_job_with_refused_children_gives_back_its_node(kind: str) -> None:
    server, store = Server(), Store()
    leader, account = _leader(server, store)
    server.refused = {kind: "exceeded quota: objects"}
    store.put(names.KIND, server.put(b.job()))
    with pytest.raises(RetryLater):
        await leader(KEY)
    assert account.snapshot(KEY).promised is None
    server.refused.clear()
    await leader(KEY)
    assert account.snapshot(KEY).promised == b.NODE


async def test_new_leader_keeps_arrival_order_of_waiting_jobs() -> None:
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


class Eventful(Server):
    """The same server, which has an event of every object."""

    async def events_of(self, namespace: str, uid: str, reason: str) -> list[Object]:
        reported = timestamp(b.NOW + timedelta(seconds=30))
        return [{"metadata": {"creationTimestamp": reported}, "message": f"{namespace} {uid} {reason}"}]


async def test_learner_pod_refusal_is_reported_from_event_message() -> None:
    server, store, after_s = Eventful(), Store(), [0.0]
    store.put(names.KIND, server.put(b.job()))
    leader = reconciler(server, store, clock=lambda: b.NOW + timedelta(seconds=after_s[0]))
    await leader(KEY)
    after_s[0] = UNMADE_S
    await leader(KEY)
    uid = server.objects["Job", "job-3v1-learner"]["metadata"]["uid"]
    reported = conditions.find(server.objects[names.KIND, KEY.name]["status"], reasons.LEARNER_RUNNING) or {}
    assert reported["reason"] == reasons.POD_REFUSED
    assert reported["message"].endswith(f"team-a {uid} FailedCreate")
