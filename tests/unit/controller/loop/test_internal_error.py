"""A bug that one job meets is reported by that job, once, and stops nothing else."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.conditions import find
from stage2_controller.plan import Plan, plan_after_bug
from stage2_controller.reconcile import Reconciler
from stage2_controller.report import explanation
from stage2_controller.report.explanation import events
from stage2_controller.spec import names
from stage2_controller.store import Store
from stage2_controller.work_queue import Broken
from tests.unit.controller import builders as b
from tests.unit.controller.fake_server import KEY, reconciler

BUG = AttributeError("'str' object has no attribute 'get'")


def broken(raw: Mapping[str, Any]) -> Plan:
    return plan_after_bug(raw, BUG, b.NOW)


def test_the_condition_has_the_text_and_says_whom_to_ask() -> None:
    made = broken(b.job())
    assert b.condition(made, reasons.ACCEPTED) == ("Unknown", reasons.INTERNAL_ERROR)
    message = b.message(made, reasons.ACCEPTED)
    assert str(BUG) in message
    assert "this is a bug of the controller, report it with the spec" in message
    assert made.status["phase"] == reasons.PENDING


def test_the_answer_to_why_it_does_not_train_is_the_bug() -> None:
    raw = b.job()
    made = broken(raw)
    step = next(step for step in explanation.chain(b.with_status(raw, made)) if step.state != "ok")
    assert (step.name, step.reason) == ("spec", reasons.INTERNAL_ERROR)
    assert b.condition(made, reasons.TRAINING) == ("False", reasons.INTERNAL_ERROR)


def test_it_is_one_warning_and_the_next_pass_writes_nothing() -> None:
    raw = b.job()
    first = broken(raw)
    (event,) = events({}, first.status)
    assert (event.type, event.reason) == ("Warning", reasons.INTERNAL_ERROR)
    assert broken(b.with_status(raw, first)).status == first.status


def test_what_runs_continues_and_is_reported_as_before() -> None:
    raw = b.job()
    running = b.planned(raw, b.started(raw))
    made = broken(b.with_status(raw, running))
    assert (made.children, made.deletions, made.keeps_place) == ((), (), True)
    assert (made.status["phase"], made.status["step"]) == (reasons.RUNNING, 4)
    assert b.condition(made, reasons.TRAINING) == ("True", reasons.TRAINS)


def test_a_refused_spec_that_was_corrected_into_a_bug_is_refused_no_more() -> None:
    refused = b.job(learner={"gpus": 2})
    made = broken(b.with_status(b.job(), b.planned(refused)))
    assert b.condition(made, reasons.FAILED) is None
    assert made.status["phase"] == reasons.PENDING


def test_a_job_that_can_be_planned_again_forgets_the_bug() -> None:
    raw = b.job()
    again = b.planned(b.with_status(raw, broken(raw)))
    assert b.condition(again, reasons.ACCEPTED) == ("True", reasons.VALID)
    assert reasons.INTERNAL_ERROR not in str(again.status)


class Statuses:
    """An API server that holds nothing and takes in statuses and events."""

    def __init__(self) -> None:
        self.statuses: list[Any] = []

    async def get(self, kind: str, namespace: str | None, name: str) -> None:
        return None

    async def apply_status(self, job: Any, status: Any) -> Any:
        self.statuses.append(status)
        return {**job, "status": status}

    async def emit(self, job: Any, event: Any, *, at: str) -> None:
        """Events are reported in the test above."""


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the jobs that have met it: from here on no job can be drafted."""
    met: list[str] = []

    def fail(raw: Any, *_: Any) -> Any:
        met.append(raw["metadata"]["name"])
        raise BUG

    monkeypatch.setattr("stage2_controller.children.build.parse", fail)
    return met


async def test_the_traceback_is_logged_once_for_a_generation(bug: list[str], caplog: pytest.LogCaptureFixture) -> None:
    store, raw = Store(), b.job()
    leader = reconciler(Statuses(), store)
    with caplog.at_level(logging.ERROR):
        for generation in (1, 1, 2, 2):
            metadata = {"generation": generation, "resourceVersion": str(len(bug) + 1)}
            store.put(names.KIND, {**raw, "metadata": {**raw["metadata"], **metadata}})
            with pytest.raises(Broken):
                await leader(KEY)
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


async def test_a_pass_that_meets_a_bug_reports_the_status_before_it_is_tried_again(bug: list[str]) -> None:
    api, store = Statuses(), Store()
    store.put(names.KIND, b.job())
    with pytest.raises(Broken):
        await reconciler(api, store)(KEY)
    (status,) = api.statuses
    reported = find(status, reasons.ACCEPTED)
    assert reported is not None
    assert reported["reason"] == reasons.INTERNAL_ERROR


class Hangs(Statuses):
    """The same, which takes in a status and never says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def apply_status(self, job: Any, status: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


class Breaks(Statuses):
    """The same, with a bug of the controller between."""

    async def apply_status(self, job: Any, status: Any) -> Any:
        raise BUG


def counted(made: Reconciler) -> dict[str, float]:
    """The passes by their results, without those that there are none of."""
    found = {result: made._metrics.passes.labels(result)._value.get() for result in ("done", "retry", "error")}
    return {result: count for result, count in found.items() if count}


async def test_a_pass_that_is_cancelled_with_the_loss_of_the_lease_counts_as_no_bug() -> None:
    api, store = Hangs(), Store()
    store.put(names.KIND, b.job(learner={"gpus": 2}))  # which is refused: nothing is written but that
    made = reconciler(api, store)
    under_way = asyncio.create_task(made(KEY))
    await asyncio.wait_for(api.asked.wait(), timeout=10)
    under_way.cancel()
    await asyncio.gather(under_way, return_exceptions=True)
    assert under_way.cancelled()
    assert counted(made) == {"retry": 1}


async def test_a_pass_that_meets_a_bug_outside_of_its_plan_counts_as_one() -> None:
    store = Store()
    store.put(names.KIND, b.job(learner={"gpus": 2}))  # which is refused: nothing is written but that
    made = reconciler(Breaks(), store)
    with pytest.raises(AttributeError) as met:
        await made(KEY)
    assert met.value is BUG
    assert counted(made) == {"error": 1}
