"""What happens to a job while a pass over it awaits an answer: it is deleted, or somebody else writes it."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from stage2_controller.cluster.progress import ProgressPolls, ProgressReader
from stage2_controller.metrics import Metrics
from stage2_controller.place.capacity import Capacity
from stage2_controller.plan import Plan
from stage2_controller.reconcile import Reconciler
from stage2_controller.spec import names
from stage2_controller.spec.names import Key
from stage2_controller.store import Store
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.loop.test_reconcile import KEY, Object, Server


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
        self.leader = self.new_leader()

    def new_leader(self) -> Reconciler:
        """A leader of the same account."""
        progress = ProgressPolls(ProgressReader(), lambda key: None, interval_s=b.SETTINGS.progress_s)
        metrics, api = Metrics(lambda: self.store.known(names.KIND)), cast("Any", self.server)
        return Reconciler(
            api, self.store, progress, b.SETTINGS, metrics=metrics, capacity=self.account, clock=lambda: b.NOW
        )

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
async def test_a_job_that_goes_while_its_pass_reads_is_promised_nothing_and_gets_no_child(happens: str) -> None:
    stage = Stage()
    stage.server.while_reading = getattr(stage, happens)
    assert await stage.leader(KEY) is None
    assert stage.account.promised(KEY) is None
    assert stage.server.written() == []
    assert ("apply", "status") not in stage.server.requests


async def test_a_job_that_goes_while_its_status_is_written_does_not_come_back_into_the_store() -> None:
    stage = Stage()
    stage.server.while_telling = stage.deleted
    await stage.leader(KEY)
    assert stage.store.one(names.KIND, KEY, KEY.name) is None
    assert stage.account.promised(KEY) is None


async def test_a_job_whose_workload_kueue_wrote_at_the_same_time_has_another_pass_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()

    async def overtaken(key: Key, made: Plan) -> bool:
        return False

    monkeypatch.setattr(stage.leader, "_patch_workload", overtaken)
    assert await stage.leader(KEY) == 1
