"""A server that is asked to stop is lost to the learner: what it drops is no refusal."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

from stage2_trainer.sync.tensors.announcement import FOLDER_ROUTE
from stage2_trainer.sync.vllm import routes
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from tests.support.ports import free_port

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(("path", "body"), [(CHAT, {}), (FOLDER_ROUTE, {"tensors": []})])
def test_request_dropped_by_stopping_server_is_reported_as_lost_server(path, body, monkeypatch):
    asked, may_end = threading.Event(), threading.Event()

    def digests(*_):
        asked.set()
        may_end.wait()
        return {}

    async def chat():
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(routes, "folder_digests", digests)
    app = FastAPI()
    app.state.model_folder = ""
    app.add_middleware(routes.Stage2Routes)
    app.post(CHAT)(chat)
    grace = {"timeout_graceful_shutdown": 1}  # by the clock: no answer ends by itself
    config = uvicorn.Config(app, port=free_port(), log_level="critical", **grace)
    server = uvicorn.Server(config)
    with ThreadPoolExecutor() as pool:
        served = pool.submit(server.run)
        while not server.started:
            time.sleep(0.01)
        client = ServerClient(f"http://127.0.0.1:{config.port}", "token", timeout_s=30)
        answer = pool.submit(client.post, path, "ask", body=body)
        try:
            assert asked.wait(60)
            server.should_exit = True
            error = answer.exception()
        finally:
            server.should_exit = True
            may_end.set()
        served.result()
    assert isinstance(error, ServerError)
    assert (error.status, "asked to stop" in error.detail) == (None, True)


@pytest.mark.parametrize(("engine_is_dead", "status"), [(True, 503), (False, 500)])
def test_request_to_dead_engine_is_answered_with_503(engine_is_dead, status):
    def chat():
        raise HTTPException(500)

    app = FastAPI()
    app.state.engine_client = SimpleNamespace(errored=engine_is_dead)
    app.add_middleware(routes.Stage2Routes)
    app.post(CHAT)(chat)
    assert TestClient(app).post(CHAT).status_code == status
