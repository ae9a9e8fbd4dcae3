"""Room that is promised to a job whose passes all fail is not kept without end: nobody may ever come."""

from datetime import timedelta

import pytest

from stage2_controller.place.placement import PROMISED_S
from stage2_controller.plan import Plan
from stage2_controller.reconcile import Reconciler
from stage2_controller.spec import names
from stage2_controller.spec.key import Key
from stage2_controller.work_queue import RetryLater
from tests.unit.controller import builders as b
from tests.unit.controller.cluster.test_capacity import FOUR
from tests.unit.controller.loop.test_deleted_mid_pass import Stage
from tests.unit.controller.loop.test_reconcile import KEY

QUOTA = "Internal error occurred: resource quota evaluation timed out"


class Failing(Stage):
    """The same job, where the API server does not do what is asked, and a time that a test moves."""

    def __init__(self) -> None:
        self.after_s = 0.0
        super().__init__()

    def new_leader(self) -> Reconciler:
        """A leader whose clock the test moves."""
        made = super().new_leader()
        made._clock = lambda: b.NOW + timedelta(seconds=self.after_s)
        return made

    async def fails(self, after_s: float) -> None:
        """Make a pass that fails."""
        self.after_s = after_s
        with pytest.raises(RetryLater):
            await self.leader(KEY)


@pytest.mark.parametrize("at", ["reads", "writes"])
async def test_room_lapses_after_a_minute_of_passes_that_fail_and_comes_back(at: str) -> None:
    stage = Failing()
    stage.server.refused_with = 500
    if at == "reads":
        stage.server.closed = ("LimitRange",)
        stage.account.promise(KEY, FOUR, b.NODE)  # as it waited, and room was freed
    else:
        stage.server.refused["ConfigMap"] = QUOTA
    await stage.fails(0)
    await stage.fails(PROMISED_S - 1)
    assert stage.account.promised(KEY) == b.NODE
    await stage.fails(PROMISED_S)
    assert stage.account.promised(KEY) is None
    stage.server.closed = ()
    stage.server.refused.clear()
    await stage.leader(KEY)
    assert stage.account.promised(KEY) == b.NODE


@pytest.mark.parametrize("between", ["a good pass", "a refusal that is told", "another job of its name", "nothing"])
async def test_the_minute_is_one_of_passes_that_all_fail(between: str) -> None:
    stage = Failing()
    stage.server.closed = ("LimitRange",)
    await stage.fails(0)
    if between == "a good pass":
        stage.store.put(names.KIND, stage.server.put({**b.job(), "spec": {**b.job()["spec"], "managedBy": "x/y"}}))
        stage.server.closed = ()
        await stage.leader(KEY)
        stage.server.closed = ("LimitRange",)
        stage.leader._pod_defaults = stage.new_leader()._pod_defaults  # which has read nothing yet
    elif between == "a refusal that is told":
        stage.server.closed, stage.server.refused_with = (), 403
        stage.server.refused["ConfigMap"] = QUOTA
        await stage.fails(0)
        stage.server.refused.clear()
        stage.server.closed, stage.server.refused_with = ("LimitRange",), 500
        stage.leader._pod_defaults = stage.new_leader()._pod_defaults
    elif between == "another job of its name":
        stage.applied_anew()
    stage.account.promise(KEY, FOUR, b.NODE)
    await stage.fails(PROMISED_S)
    assert stage.account.promised(KEY) == (None if between == "nothing" else b.NODE)


async def test_a_job_whose_children_stand_keeps_its_room_while_nothing_can_be_read() -> None:
    stage = Failing()
    await stage.leader(KEY)
    stage.told()
    stage.leader = stage.new_leader()
    stage.server.closed = ("LimitRange",)
    await stage.fails(0)
    await stage.fails(PROMISED_S)
    assert stage.account.promised(KEY) == b.NODE


async def test_a_job_whose_workload_kueue_wrote_at_the_same_time_has_another_pass_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Failing()

    async def overtaken(key: Key, made: Plan) -> bool:
        return False

    monkeypatch.setattr(stage.leader, "_tell_kueue", overtaken)
    assert await stage.leader(KEY) == 1
