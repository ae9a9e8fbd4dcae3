"""What the client makes of the API server's answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client

from stage2_controller.cluster.api_server import Api, ApiRefused


async def _patched(status: int) -> bool:
    """What is told of a patch that the API server answers with this code."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"message": "told"}, status=status)

    application = web.Application()
    application.router.add_patch("/apis/kueue.x-k8s.io/v1beta2/namespaces/team-a/workloads/one/status", answer)
    async with TestServer(application) as server:
        api = Api(client.ApiClient(client.Configuration(host=str(server.make_url("")))), lambda *_: None)
        try:
            patch = {"metadata": {"resourceVersion": "7"}, "status": {"conditions": []}}
            return await api.patch_status("Workload", "team-a", "one", patch)
        finally:
            await api.close()


@pytest.mark.parametrize(("status", "told"), [(200, True), (404, True), (409, False)])
def test_a_patch_of_a_version_that_has_changed_asks_to_look_again(status: int, told: bool) -> None:
    assert asyncio.run(_patched(status)) is told


def test_a_patch_that_is_refused_is_no_success() -> None:
    with pytest.raises(ApiRefused):
        asyncio.run(_patched(403))


PODS = [{"metadata": {"name": str(number), "managedFields": ["much"]}} for number in range(1_200)]


async def _listing(use: Callable[[Api], Awaitable[Any]]) -> tuple[Any, list[dict[str, str]]]:
    """What a use of a client makes of 1,200 pods, and the queries that it sent."""
    queries: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        queries.append(dict(request.query))
        first, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        more = {"continue": str(first + limit)} if first + limit < len(PODS) else {}
        page = PODS[first : first + limit]
        return web.json_response({"items": page, "metadata": {"resourceVersion": "7", **more}})

    application = web.Application()
    application.router.add_get("/api/v1/pods", answer)
    async with TestServer(application) as server:
        api = Api(client.ApiClient(client.Configuration(host=str(server.make_url("")))), lambda *_: None)
        try:
            return await use(api), queries
        finally:
            await api.close()


def test_a_list_comes_in_pages_and_without_the_bookkeeping_of_field_managers() -> None:
    listed, queries = asyncio.run(_listing(lambda api: api.list("Pod", None, labelled=True)))
    assert [item["metadata"] for item in listed["items"]] == [{"name": str(number)} for number in range(1_200)]
    assert listed["metadata"]["resourceVersion"] == "7"
    assert [query.get("continue") for query in queries] == [None, "500", "1000"]
    assert {query["labelSelector"] for query in queries} == {"app.kubernetes.io/managed-by=stage2"}


def test_pages_are_asked_for_one_after_the_other_as_they_are_used() -> None:
    async def first(api: Api) -> int:
        async for page in api.pages("Pod", None, labels=None, fields="status.phase!=Failed"):
            return len(page["items"])
        return 0

    length, queries = asyncio.run(_listing(first))
    assert (length, len(queries)) == (500, 1)
    assert queries[0]["fieldSelector"] == "status.phase!=Failed"
