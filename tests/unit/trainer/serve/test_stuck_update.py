"""/health tells the truth about a server whose worker never comes back from a weight update."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from stage2_trainer.sync.vllm import routes
from stage2_trainer.sync.vllm.routes import UpdateWatch


class Server:
    """An app whose update calls end when they are let go, with the learner's end of each call."""

    def __init__(self):
        self.watch = UpdateWatch(self.answer)
        self.may_end = asyncio.Event()
        self.bodies = []
        self.ended = []
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(errored=False)))

    async def answer(self, scope, receive, send):
        if scope["path"] == "/update_weights":
            self.bodies.append((await receive())["body"])
            try:
                await self.may_end.wait()
            finally:
                self.ended.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def call(self, path, body=b"", *, hung_up=None):
        sent = []
        half = len(body) // 2
        messages = [
            {"type": "http.request", "body": body[:half], "more_body": True},
            {"type": "http.request", "body": body[half:]},
        ]

        async def receive():
            if messages:
                return messages.pop(0)
            await (hung_up or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await self.watch({"type": "http", "path": path, "app": self.app}, receive, send)
        return sent[0]["status"]


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def left_alone(server, timeout_s=0.0):
    """Have a learner leave in the middle of an update that may take so long; returns the update, which goes on."""
    hung_up = asyncio.Event()
    await server.call("/init_weight_transfer_engine", json.dumps({"init_info": {"timeout_s": timeout_s}}).encode())
    update = asyncio.ensure_future(server.call("/update_weights", hung_up=hung_up))
    await settle()
    hung_up.set()
    await settle()
    return update


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(routes, "LOADING_S", 0.0)


async def test_health_is_ok_while_learner_waits_for_update():
    server = Server()
    await server.call("/init_weight_transfer_engine", b'{"init_info": {"timeout_s": 0.0}}')
    update = asyncio.ensure_future(server.call("/update_weights", b"names and shapes"))
    await settle()
    assert await server.call("/health") == 200
    server.may_end.set()
    assert await update == 200
    assert server.bodies == [b"names and shapes"]


async def test_health_fails_while_update_runs_without_its_learner():
    server = Server()
    update = await left_alone(server)
    assert await server.call("/health") == 503
    server.may_end.set()
    await update
    assert await server.call("/health") == 200


async def test_health_is_ok_until_deadline_of_update():
    server = Server()
    update = await left_alone(server, timeout_s=900)
    assert await server.call("/health") == 200
    server.may_end.set()
    await update


@pytest.mark.parametrize("learner_has_gone", [False, True])
async def test_update_ends_when_engine_has_died(monkeypatch, learner_has_gone):
    """Else vLLM's server, which waits for it before it ends, would stand there for ever with its port closed."""
    monkeypatch.setattr(routes, "ENGINE_CHECK_S", 0.01)
    server, hung_up = Server(), asyncio.Event()
    update = asyncio.ensure_future(server.call("/update_weights", hung_up=hung_up))
    await settle()
    if learner_has_gone:
        hung_up.set()
        await settle()
    server.app.state.engine_client.errored = True
    assert await asyncio.wait_for(update, 20) == 503
    await settle()
    assert server.ended == ["/update_weights"]


async def test_update_is_cancelled_when_server_stops():
    """Else it would work on while vLLM takes its engine down, and answer a learner that has its answer."""
    server = Server()
    update = asyncio.ensure_future(server.call("/update_weights"))
    await settle()
    update.cancel()
    await settle()
    assert (update.cancelled(), server.ended) == (True, ["/update_weights"])


@pytest.mark.parametrize("body", [b"", b"[]", b'{"init_info": {}}', b'{"init_info": {"timeout_s": "x"}}'])
async def test_unreadable_init_request_is_passed_to_route(body):
    assert await Server().call("/init_weight_transfer_engine", body) == 200
