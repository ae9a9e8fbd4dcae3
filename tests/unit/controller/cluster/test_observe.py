"""What is read beside the watches: objects that none shows, once in a while, and why a learner's Job has no pod."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from stage2_controller.cluster.api_server import ApiRefused
from stage2_controller.cluster.observe import CreationFailures, ReadCache
from stage2_controller.place.binding import UNMADE_S
from stage2_controller.state import reasons
from stage2_controller.state.conditions import timestamp
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n

QUOTA = 'Error creating: pods "job-3v1-learner-x" is forbidden: exceeded quota: gpus'


def event(text: str, *, after_s: float = 1, **times: Any) -> Any:
    at = timestamp(b.NOW + timedelta(seconds=after_s))
    return {"metadata": {"name": "e", "creationTimestamp": at}, "message": text, "lastTimestamp": at, **times}


class Events:
    """An API server with events of a learner's Job."""

    def __init__(self, *events: Any) -> None:
        self.events = list(events)
        self.asked: list[tuple[str, str, str]] = []
        self.fails: Exception | None = None

    async def events_of(self, namespace: str, uid: str, reason: str) -> Any:
        self.asked.append((namespace, uid, reason))
        if self.fails:
            raise self.fails
        return self.events


class Stage:
    """A learner's Job without a pod, and a time that a test moves."""

    def __init__(self, *events: Any) -> None:
        self.api, self.after_s = Events(*events), UNMADE_S
        self.refused = CreationFailures(self.api, lambda: b.NOW + timedelta(seconds=self.after_s))
        made = b.learner_job(b.planned(b.job()))
        metadata = {**made["metadata"], "uid": "u", "creationTimestamp": timestamp(b.NOW)}
        self.seen = Observed(learner={**made, "metadata": metadata})
        self.status: Any = {}

    async def refusal(self) -> str | None:
        """The answer of one pass."""
        return await self.refused.of_learner(n.KEY, self.seen, self.status)

    def learner(self, **fields: Any) -> None:
        """Change the learner's Job."""
        self.seen = replace(self.seen, learner={**(self.seen.learner or {}), **fields})


async def test_newest_event_explains_learner_job_without_pod() -> None:
    stage = Stage(event("an older sentence"), event(QUOTA, after_s=30), event("before", after_s=2))
    assert await stage.refusal() == QUOTA
    assert stage.api.asked == [("team-a", "u", "FailedCreate")]


async def test_repeated_event_is_dated_by_its_last_occurrence() -> None:
    series = {"lastObservedTime": timestamp(b.NOW + timedelta(seconds=50)).replace("Z", ".000001Z")}
    again = event(QUOTA, series=series, lastTimestamp=None, eventTime=None)
    assert await Stage(again, event("older", after_s=40)).refusal() == QUOTA


async def test_events_are_requested_after_first_minute_then_every_five() -> None:
    stage = Stage(event(QUOTA))
    stage.after_s = UNMADE_S - 1
    assert await stage.refusal() is None
    assert stage.api.asked == []
    for stage.after_s in (UNMADE_S, UNMADE_S + 30, UNMADE_S + 299):
        assert await stage.refusal() == QUOTA
    assert len(stage.api.asked) == 1
    stage.after_s = UNMADE_S + 300
    stage.api.events.clear()
    assert await stage.refusal() is None, "events do not live long"
    assert len(stage.api.asked) == 2


@pytest.mark.parametrize("state", ["a pod", "suspended", "goes", "ended", "none"])
async def test_events_are_not_requested_when_no_pod_is_missing(state: str) -> None:
    stage = Stage(event(QUOTA))
    metadata: Any = (stage.seen.learner or {})["metadata"]
    if state == "a pod":
        stage.seen = replace(stage.seen, pods=(b.learner_pod(),))
    elif state == "suspended":
        stage.learner(spec={"suspend": True})
    elif state == "goes":
        stage.learner(metadata={**metadata, "deletionTimestamp": timestamp(b.NOW)})
    elif state == "ended":
        stage.learner(status={"conditions": [b.job_condition("Failed")]})
    else:
        stage.seen = Observed()
    assert await stage.refusal() is None
    assert stage.api.asked == []


async def test_event_older_than_last_pod_is_ignored() -> None:
    """A node that went took the learner's pod: what kept it waiting for an hour at first has long been mended."""
    stage = Stage(event(QUOTA))
    gone = timestamp(b.NOW + timedelta(seconds=3600))
    stage.status = {"conditions": [{"type": reasons.LEARNER_RUNNING, "status": "False", "lastTransitionTime": gone}]}
    stage.after_s = 3600 + UNMADE_S
    assert await stage.refusal() is None


def refused_with(status: int) -> ApiRefused:
    answer: Any = SimpleNamespace(status=status, reason="no", body="{}")
    return ApiRefused("list events", answer)


@pytest.mark.parametrize("fails", [refused_with(403), refused_with(500), aiohttp.ClientError("cut"), TimeoutError()])
async def test_unreadable_events_are_ignored_and_not_retried_at_once(fails: Exception) -> None:
    stage = Stage(event(QUOTA))
    stage.api.fails = fails
    for _ in range(2):
        assert await stage.refusal() is None
    assert len(stage.api.asked) == 1, "a failure is no reason to ask more often"


async def test_refusal_of_deleted_job_is_forgotten() -> None:
    stage = Stage(event(QUOTA))
    await stage.refusal()
    stage.refused.forget(n.KEY)
    await stage.refusal()
    assert len(stage.api.asked) == 2


class Objects:
    """An API server with objects by name; counts how often it was asked."""

    def __init__(self, **objects: Any) -> None:
        self.objects = objects
        self.asked = 0

    async def get(self, kind: str, namespace: str | None, name: str) -> Any:
        self.asked += 1
        return self.objects.get(name)


class Clock:
    """A time that a test moves."""

    def __init__(self) -> None:
        self.now = b.NOW

    def __call__(self) -> Any:
        return self.now


def body(**data: str) -> Any:
    return {"metadata": {"name": "x", "managedFields": [{"manager": "y"}]}, "data": data}


@pytest.mark.parametrize("there", [{}, {"x": body()}], ids=["absent", "there"])
async def test_cached_object_is_read_again_after_two_minutes(there: dict[str, Any]) -> None:
    api, clock = Objects(**there), Clock()
    named = ReadCache(api, clock)
    for _ in range(3):
        await named.get("Secret", "team-a", "x")
    assert api.asked == 1
    clock.now += timedelta(minutes=2)
    await named.get("Secret", "team-a", "x")
    assert api.asked == 2


async def test_cached_object_is_read_again_when_clock_is_set_back() -> None:
    """Else it counted for as long as the clock was wrong."""
    api, clock = Objects(x=body()), Clock()
    named = ReadCache(api, clock)
    await named.get("Secret", "team-a", "x")
    clock.now -= timedelta(hours=3)
    await named.get("Secret", "team-a", "x")
    assert api.asked == 2


async def test_written_object_is_cached_and_forgotten_one_is_read_again() -> None:
    api = Objects(x=body(of="the API server"))
    named = ReadCache(api, Clock())
    named.put("ConfigMap", "team-a", "x", body(of="a write"))
    found: Any = await named.get("ConfigMap", "team-a", "x")
    assert (found["data"], api.asked) == ({"of": "a write"}, 0)
    assert "managedFields" not in found["metadata"]
    named.forget("ConfigMap", "team-a", "x")
    again: Any = await named.get("ConfigMap", "team-a", "x")
    assert (again["data"], api.asked) == ({"of": "the API server"}, 1)


async def test_objects_of_same_name_in_two_namespaces_are_cached_separately() -> None:
    api = Objects(x=body())
    named = ReadCache(api, Clock())
    await named.get("Secret", "team-a", "x")
    await named.get("Secret", "team-b", "x")
    await named.get("ConfigMap", "team-b", "x")
    assert api.asked == 3
