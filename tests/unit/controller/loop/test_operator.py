"""The controller's process ends when what it is there for has ended, so that another one can do it."""

import asyncio
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.job.settings import Settings
from stage2_controller.loop import main
from stage2_controller.loop.controller_metrics import Metrics
from stage2_controller.loop.operator import Controller, Options
from stage2_controller.loop.work_queue import WorkQueue
from tests.unit.controller.cluster.test_election import Leases


class Fails:
    """A reconciler that cannot start."""

    def restore(self) -> None:
        raise AttributeError("a bug")


class Idle:
    """A reconciler that has nothing to do, and a comparison of the watches that never ends."""

    def restore(self) -> None:
        """Nothing to enter."""

    async def fill(self) -> None:
        """Nothing exists."""

    async def run(self) -> None:
        await asyncio.Event().wait()


def controller(reconciler: Any, *, lease: tuple[str, str] | None) -> Controller:
    made = Controller(settings=Settings(), options=Options(lease=lease))
    made.metrics = Metrics(lambda: made.store.known(names.KIND))
    made.reconciler = reconciler
    made.queue = WorkQueue(reconciler)
    api: Any = Leases()
    idle: Any = Idle()
    made._api, made.freshness = api, idle
    return made


@pytest.mark.parametrize("lease", [None, ("stage2-system", "stage2")], ids=["alone", "of two replicas"])
async def test_a_bug_that_ends_the_work_ends_the_process(lease: tuple[str, str] | None) -> None:
    made = controller(Fails(), lease=lease)
    await made.start()
    await asyncio.wait_for(made.stop_flag.wait(), timeout=10)
    assert made.broken
    assert not made.lost
    await made.stop()


async def test_the_lease_is_given_up_by_a_leader_that_broke() -> None:
    made = controller(Fails(), lease=("stage2-system", "stage2"))
    await made.start()
    await asyncio.wait_for(made.stop_flag.wait(), timeout=10)
    await made.stop()
    leases: Any = made._api
    assert leases.lease["spec"]["holderIdentity"] == ""


async def test_a_process_that_is_asked_to_end_is_not_broken() -> None:
    made = controller(Idle(), lease=None)
    await made.start()
    await asyncio.sleep(0)
    await made.stop()
    assert not made.broken
    assert not made.stop_flag.is_set()


def test_a_broken_process_ends_with_an_error_for_the_kubelet(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(made: Controller) -> None:
        made.broken = True

    monkeypatch.setattr("stage2_controller.loop.operator.run", end)
    with pytest.raises(SystemExit) as ended:
        main.main([])
    assert ended.value.code
