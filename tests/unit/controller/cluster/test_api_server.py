"""What the client makes of the API server's answers."""

import asyncio

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
