"""A bug that one job meets is reported by that job, once, and stops nothing else."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.loop.reconcile import Reconciler
from stage2_controller.loop.work_queue import Broken
from stage2_controller.plan import status as statuses
from stage2_controller.plan.result import Plan
from stage2_controller.report import explanation
from stage2_controller.report.explanation import events
from stage2_controller.state import reasons
from stage2_controller.state.store import Store
from tests.unit.controller import builders as b
from tests.unit.controller.fake_server import KEY, Server, reconciler

BUG = AttributeError("'str' object has no attribute 'get'")


def broken(raw: Mapping[str, Any]) -> Plan:
    return Plan(status=statuses.after_bug(raw, BUG, b.NOW), keeps_place=True)


def test_internal_error_condition_has_text_and_advice() -> None:
    made = broken(b.job())
    assert b.condition(made, reasons.ACCEPTED) == ("Unknown", reasons.INTERNAL_ERROR)
    message = b.message(made, reasons.ACCEPTED)
    assert str(BUG) in message
    assert "this is a bug of the controller, report it with the spec" in message
    assert made.status["phase"] == reasons.PENDING


def test_explain_names_internal_error() -> None:
    raw = b.job()
    made = broken(raw)
    step = next(step for step in explanation.chain(b.with_status(raw, made)) if step.state != "ok")
    assert (step.name, step.reason) == ("spec", reasons.INTERNAL_ERROR)
    assert b.condition(made, reasons.TRAINING) == ("False", reasons.INTERNAL_ERROR)


def test_internal_error_emits_single_warning_and_next_pass_writes_nothing() -> None:
    raw = b.job()
    first = broken(raw)
    (event,) = events({}, first.status)
    assert (event.type, event.reason) == ("Warning", reasons.INTERNAL_ERROR)
    assert broken(b.with_status(raw, first)).status == first.status


def test_running_job_continues_and_keeps_status_during_internal_error() -> None:
    raw = b.job()
    running = b.planned(raw, b.started(raw))
    made = broken(b.with_status(raw, running))
    assert (made.children, made.deletions, made.keeps_place) == ((), (), True)
    assert (made.status["phase"], made.status["step"]) == (reasons.RUNNING, 4)
    assert b.condition(made, reasons.TRAINING) == ("True", reasons.INTERNAL_ERROR)


def test_corrected_spec_that_hits_bug_is_no_longer_refused() -> None:
    refused = b.job(learner={"gpus": 2})
    made = broken(b.with_status(b.job(), b.planned(refused)))
    assert b.condition(made, reasons.FAILED) is None
    assert made.status["phase"] == reasons.PENDING


def test_job_that_can_be_planned_again_clears_internal_error() -> None:
    raw = b.job()
    again = b.planned(b.with_status(raw, broken(raw)))
    assert b.condition(again, reasons.ACCEPTED) == ("True", reasons.VALID)
    assert reasons.INTERNAL_ERROR not in str(again.status)


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the jobs that have met it: from here on no job can be drafted."""
    met: list[str] = []

    def fail(raw: Any, *_: Any) -> Any:
        met.append(raw["metadata"]["name"])
        raise BUG

    monkeypatch.setattr("stage2_controller.children.build.parse", fail)
    return met


@pytest.fixture
def server() -> Server:
    """An API server with a job that is refused: a pass writes nothing but its status."""
    made = Server()
    made.put(b.job(learner={"gpus": 2}))
    return made


def leader(server: Server) -> Reconciler:
    """A controller that knows what this API server holds."""
    store = Store()
    store.put(names.KIND, server.objects[names.KIND, KEY.name])
    return reconciler(server, store)


async def test_traceback_is_logged_once_per_generation(
    server: Server, bug: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    store = Store()
    passes = reconciler(server, store)
    with caplog.at_level(logging.ERROR):
        for generation in (1, 1, 2, 2):
            store.put(names.KIND, server.put(b.job(), generation=generation))
            with pytest.raises(Broken):
                await passes(KEY)
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def counted(made: Reconciler) -> dict[str, float]:
    """The passes by their results, without those that there are none of."""
    found = {result: made._metrics.passes.labels(result)._value.get() for result in ("done", "retry", "error")}
    return {result: count for result, count in found.items() if count}


async def test_pass_cancelled_with_lease_does_not_count_as_bug(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def hang(job: Any, status: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(server, "apply_status", hang)
    passes = leader(server)
    under_way = asyncio.create_task(passes(KEY))
    await asyncio.wait_for(asked.wait(), timeout=10)
    under_way.cancel()
    await asyncio.gather(under_way, return_exceptions=True)
    assert under_way.cancelled()
    assert counted(passes) == {"retry": 1}


async def test_bug_outside_planning_counts_as_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(job: Any, status: Any) -> None:
        raise BUG

    monkeypatch.setattr(server, "apply_status", fail)
    passes = leader(server)
    with pytest.raises(AttributeError) as met:
        await passes(KEY)
    assert met.value is BUG
    assert counted(passes) == {"error": 1}
