"""Objects that no watch shows are read once in a while, and anew after they were written."""

from datetime import timedelta
from typing import Any

import pytest

from stage2_controller.cluster.observe import ReadCache
from tests.unit.controller import builders as b


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
async def test_an_object_is_read_again_after_two_minutes_only(there: dict[str, Any]) -> None:
    api, clock = Objects(**there), Clock()
    named = ReadCache(api, clock)
    for _ in range(3):
        await named.get("Secret", "team-a", "x")
    assert api.asked == 1
    clock.now += timedelta(minutes=2)
    await named.get("Secret", "team-a", "x")
    assert api.asked == 2


async def test_what_was_written_is_known_without_a_request_and_what_is_forgotten_is_read() -> None:
    api = Objects(x=body(of="the API server"))
    named = ReadCache(api, Clock())
    named.put("ConfigMap", "team-a", "x", body(of="a write"))
    found: Any = await named.get("ConfigMap", "team-a", "x")
    assert (found["data"], api.asked) == ({"of": "a write"}, 0)
    assert "managedFields" not in found["metadata"]
    named.forget("ConfigMap", "team-a", "x")
    again: Any = await named.get("ConfigMap", "team-a", "x")
    assert (again["data"], api.asked) == ({"of": "the API server"}, 1)


async def test_objects_of_one_name_in_two_namespaces_are_two() -> None:
    api = Objects(x=body())
    named = ReadCache(api, Clock())
    await named.get("Secret", "team-a", "x")
    await named.get("Secret", "team-b", "x")
    await named.get("ConfigMap", "team-b", "x")
    assert api.asked == 3
