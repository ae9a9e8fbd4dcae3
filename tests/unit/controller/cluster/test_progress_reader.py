"""Asking a learner for its progress, over real HTTP on the loopback address."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from stage2_api.pod import files
from stage2_controller.cluster.progress_reader import ProgressReader
from tests.unit.controller import builders as b

SECRET = {"data": {files.TOKEN_KEY: base64.b64encode(b"t0ken").decode()}}
POD = {**b.learner_pod(), "status": {**b.learner_pod()["status"], "podIP": "127.0.0.1"}}


@pytest.fixture
async def reader() -> AsyncIterator[ProgressReader]:
    """A reader of a learner that demands its token."""

    async def progress(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer t0ken":
            return web.json_response({}, status=401)
        return web.json_response(b.report(step=7).document())

    application = web.Application()
    application.router.add_get("/progress", progress)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made = ProgressReader(port=runner.addresses[0][1])
    yield made
    await made.close()
    await runner.cleanup()


async def test_a_running_learner_answers(reader: ProgressReader) -> None:
    report = await reader.read(POD, SECRET)
    assert report is not None
    assert report.step == 7


@pytest.mark.parametrize(
    ("pod", "secret"),
    [
        (None, SECRET),
        (POD, None),
        ({**POD, "status": {"podIP": "127.0.0.1"}}, SECRET),
        (POD, {"data": {files.TOKEN_KEY: base64.b64encode(b"another").decode()}}),
        ({**POD, "status": {**POD["status"], "podIP": "127.0.0.2"}}, SECRET),
    ],
    ids=["no pod", "no token", "not running yet", "refused", "nobody there"],
)
async def test_a_learner_that_cannot_be_asked_has_no_report(reader: ProgressReader, pod: Any, secret: Any) -> None:
    assert await reader.read(pod, secret) is None
