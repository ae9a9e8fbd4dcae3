"""Learners are asked beside the passes: a pass never waits, and is asked for when a learner says something new."""

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stage2_controller.cluster import progress
from stage2_controller.cluster.progress import ProgressPolls
from stage2_controller.spec.names import Key
from tests.unit.controller import builders as b

KEY = Key("team-a", "job-3v1")
SECRET: dict[str, Any] = {"data": {"token": "dA=="}}


class Learner:
    """Answers with what it is asked to, or hangs."""

    def __init__(self) -> None:
        self.report: Any = {"step": 1}
        self.asked = 0
        self.hangs = False

    async def read(self, pod: Any, secret: Any) -> Any:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if isinstance(self.report, Exception):
            raise self.report
        return self.report

    async def close(self) -> None:
        self.hangs = False


class Stage:
    """Polls of one learner under a clock that stands still, and how often a pass was asked for."""

    def __init__(self) -> None:
        self.learner, self.reported, self.now = Learner(), 0, 0.0
        self.polls = ProgressPolls(self.learner, self._tell, interval_s=10.0, clock=lambda: self.now)
        self.pod = b.learner_pod(b.up("learner"))

    def _tell(self, key: Key) -> None:
        assert key == KEY
        self.reported += 1

    async def pass_(self, pod: Any = None) -> Any:
        """What a pass is given; then whatever was asked for is answered."""
        found = self.polls.latest(KEY, pod or self.pod, SECRET)
        for _ in range(5):
            await asyncio.sleep(0)
        return found


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    yield made
    await made.polls.close()


async def test_the_first_report_comes_with_the_next_pass_which_it_asks_for(stage: Stage) -> None:
    assert await stage.pass_() is None
    assert stage.reported == 1
    assert await stage.pass_() == {"step": 1}
    assert (stage.learner.asked, stage.reported) == (1, 1), "a fresh report is not asked for again"


async def test_an_old_report_is_requested_again_and_only_news_ask_for_a_pass(stage: Stage) -> None:
    await stage.pass_()
    stage.now = 10.0
    assert await stage.pass_() == {"step": 1}
    assert (stage.learner.asked, stage.reported) == (2, 1)
    stage.now, stage.learner.report = 20.0, {"step": 2}
    assert await stage.pass_() == {"step": 1}
    assert (stage.learner.asked, stage.reported) == (3, 2)
    assert await stage.pass_() == {"step": 2}


async def test_a_learner_that_does_not_answer_keeps_no_pass_waiting(stage: Stage) -> None:
    stage.learner.hangs = True
    for _ in range(3):
        assert await stage.pass_() is None
        stage.now += 10.0
    assert stage.learner.asked == 1


async def test_what_an_earlier_pod_said_is_no_report_of_this_one(stage: Stage) -> None:
    await stage.pass_()
    other = copy.deepcopy(stage.pod)
    other["metadata"]["uid"] = "another"
    assert await stage.pass_(other) is None
    assert await stage.pass_(other) == {"step": 1}


async def test_a_report_that_cannot_be_read_is_none_and_the_next_one_is_asked_for(stage: Stage) -> None:
    stage.learner.report = KeyError("token")
    assert await stage.pass_() is None
    stage.now, stage.learner.report = 10.0, {"step": 3}
    await stage.pass_()
    assert await stage.pass_() == {"step": 3}


async def test_only_so_many_learners_are_asked_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.learner.hangs = True
    for index in range(progress._AT_ONCE + 5):
        stage.polls.latest(Key("team-a", f"job-{index}"), stage.pod, SECRET)
    for _ in range(5):
        await asyncio.sleep(0)
    assert stage.learner.asked == progress._AT_ONCE
