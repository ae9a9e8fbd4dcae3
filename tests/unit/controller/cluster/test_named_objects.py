"""Objects that no watch shows are read once in a while, and anew after they were written."""

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from stage2_controller.cluster.api_server import ApiRefused
from stage2_controller.cluster.named_objects import DefaultsOfPods, NamedObjects
from stage2_controller.place.pod_defaults import PodDefaults
from tests.unit.controller import builders as b


class Objects:
    """An API server with objects by name; counts how often it was asked."""

    def __init__(self, **objects: Any) -> None:
        self.objects = objects
        self.asked = 0
        self.status = 200

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
async def test_an_object_is_read_again_after_two_minutes_only(there: dict[str, Any]) -> None:
    api, clock = Objects(**there), Clock()
    named = NamedObjects(api, clock)
    for _ in range(3):
        await named.get("Secret", "team-a", "x")
    assert api.asked == 1
    clock.now += timedelta(minutes=2)
    await named.get("Secret", "team-a", "x")
    assert api.asked == 2


async def test_what_was_written_is_known_without_a_request_and_what_is_forgotten_is_read() -> None:
    api = Objects(x=body(of="the API server"))
    named = NamedObjects(api, Clock())
    named.put("ConfigMap", "team-a", "x", body(of="a write"))
    found: Any = await named.get("ConfigMap", "team-a", "x")
    assert (found["data"], api.asked) == ({"of": "a write"}, 0)
    assert "managedFields" not in found["metadata"]
    named.forget("ConfigMap", "team-a", "x")
    again: Any = await named.get("ConfigMap", "team-a", "x")
    assert (again["data"], api.asked) == ({"of": "the API server"}, 1)


async def test_objects_of_one_name_in_two_namespaces_are_two() -> None:
    api = Objects(x=body())
    named = NamedObjects(api, Clock())
    await named.get("Secret", "team-a", "x")
    await named.get("Secret", "team-b", "x")
    await named.get("ConfigMap", "team-b", "x")
    assert api.asked == 3


class Cluster(Objects):
    """An API server whose objects stand by kind, namespace and name; counts lists too."""

    async def get(self, kind: str, namespace: str | None, name: str) -> Any:
        self.asked += 1
        return self.objects.get(f"{kind}/{namespace}/{name}")

    async def list(self, kind: str, namespace: str | None, *, labelled: bool) -> Any:
        self.asked += 1
        return {"items": [one for key, one in self.objects.items() if key.startswith(f"{kind}/{namespace}/")]}


def of_name(name: str, **fields: Any) -> Any:
    return {"metadata": {"name": name}, **fields}


async def test_what_the_api_server_adds_to_pods_is_read_once_in_two_minutes() -> None:
    item = {"type": "Container", "defaultRequest": {"cpu": "2"}}
    api, clock = Cluster(**{"LimitRange/team-a/a": of_name("a", spec={"limits": [item]})}), Clock()
    defaults = DefaultsOfPods(api, clock)
    for _ in range(3):
        assert (await defaults.of("team-a", {})).requests == {"cpu": 2}
    assert api.asked == 2, "limit ranges of the namespace, and the priority classes"
    assert (await defaults.of("team-b", {})).requests == {}
    assert api.asked == 3
    api.objects.clear()
    clock.now += timedelta(minutes=2)
    assert (await defaults.of("team-a", {})).requests == {}


async def test_passes_at_one_time_ask_once_for_what_is_added_to_all_pods() -> None:
    class Slow(Cluster):
        async def list(self, kind: str, namespace: str | None, *, labelled: bool) -> Any:
            await asyncio.sleep(0)
            return await super().list(kind, namespace, labelled=labelled)

    api = Slow()
    defaults = DefaultsOfPods(api, Clock())
    await asyncio.gather(*(defaults.of("team-a", {}) for _ in range(8)))
    assert api.asked == 2, "limit ranges of the namespace, and the priority classes"


async def test_a_namespace_whose_list_takes_long_keeps_no_other_waiting() -> None:
    class Held(Cluster):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.free = asyncio.Event(), asyncio.Event()

        async def list(self, kind: str, namespace: str | None, *, labelled: bool) -> Any:
            if namespace == "team-a":
                self.held.set()
                await self.free.wait()
            return await super().list(kind, namespace, labelled=labelled)

    api = Held()
    defaults = DefaultsOfPods(api, Clock())
    waiting = asyncio.gather(*(defaults.of("team-a", {}) for _ in range(2)))
    await api.held.wait()
    for _ in range(2):
        async with asyncio.timeout(10):
            assert await defaults.of("team-b", {}) == PodDefaults()
    assert not waiting.done()
    api.free.set()
    assert await waiting == [PodDefaults()] * 2
    assert api.asked == 3, "limit ranges of each namespace, and the priority classes"


async def test_a_priority_class_that_a_job_names_is_asked_for_until_it_is_there() -> None:
    api = Cluster(**{"PriorityClass/None/usual": of_name("usual", value=3, globalDefault=True)})
    defaults, named = DefaultsOfPods(api, Clock()), {"placement": {"priorityClassName": "high"}}
    assert ((await defaults.of("team-a", {})).default_class or {})["value"] == 3
    assert (await defaults.of("team-a", named)).priority_classes == {}
    high = api.objects["PriorityClass/None/high"] = of_name("high", value=7)
    for _ in range(2):
        assert (await defaults.of("team-a", named)).priority_classes == {"high": high}
    assert api.asked == 4, "two lists, and the class until it is there"


async def test_a_runtime_class_is_read_where_a_template_names_one() -> None:
    kata = of_name("kata", handler="kata", overhead={"podFixed": {"memory": "1Gi"}})
    api = Cluster(**{"RuntimeClass/None/kata": kata})
    named = {"rollout": {"template": {"spec": {"runtimeClassName": "kata"}}}, "learner": {"template": []}}
    assert (await DefaultsOfPods(api, Clock()).of("team-a", named)).runtime_classes == {"kata": kata}


async def test_what_may_not_be_read_counts_as_nothing_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Forbidding(Cluster):
        async def list(self, kind: str, namespace: str | None, *, labelled: bool) -> Any:
            answer: Any = SimpleNamespace(status=self.status, reason="Forbidden", body="{}")
            raise ApiRefused(f"list {kind}", answer)

    api, clock = Forbidding(), Clock()
    api.status = 403
    defaults = DefaultsOfPods(api, clock)
    for _ in range(2):
        assert await defaults.of("team-a", {}) == PodDefaults()
        clock.now += timedelta(minutes=3)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["list LimitRange", "list PriorityClass"]
    api.status = 500
    with pytest.raises(ApiRefused):
        await defaults.of("team-a", {})
