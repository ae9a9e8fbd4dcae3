"""Several calls of a server's routes in one request: in order, each as if it had come by itself, and none too many."""

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI

from stage2_trainer.serve.guard import TokenGuard
from stage2_trainer.sync.vllm.routes import Stage2Routes, UpdateWatch
from stage2_trainer.wire.calls import CALLS_ROUTE, Call, calls_to_json, is_met

BEARER = {"Authorization": "Bearer secret"}
PAUSE, START, FINISH = (
    Call("pause", "/pause?mode=abort"),
    Call("start", "/start_weight_update"),
    "/finish_weight_update",
)
VERSION = Call("version", "/weight_info", method="GET", demand={"weight_version": "3"})


class Server:
    """An app with some of an update's routes, which notes what is called; `start` waits until it may end."""

    def __init__(self):
        self.called = []
        self.version = "3"
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.app = FastAPI()
        for middleware in (UpdateWatch, Stage2Routes, TokenGuard):
            self.app.add_middleware(middleware)
        self.app.post("/pause")(self.pause)
        self.app.post("/start_weight_update")(self.start)
        self.app.post(FINISH)(self.finish)
        self.app.get("/weight_info")(self.weight_info)
        self.app.post("/v1/chat/completions")(self.pause)

    async def pause(self, mode: str = ""):
        self.called.append(f"pause {mode}")
        return {"status": "paused"}

    async def start(self):
        await self.may_start.wait()
        self.called.append("start")

    async def finish(self, body: dict[str, str]):
        self.called.append(f"finish {body['weight_version']}")
        if body["weight_version"] == "bad":
            raise RuntimeError("no update is open")
        return {}

    async def weight_info(self):
        return {"weight_version": self.version}

    async def ask(self, *calls, headers=BEARER):
        return await self.send(calls_to_json(calls), headers=headers)

    async def send(self, body, *, method="POST", headers=BEARER):
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, CALLS_ROUTE, content=body, headers=headers)


@pytest.fixture
def server(token):
    return Server()


def lines(found):
    return [json.loads(line) for line in found.text.splitlines()]


def answers(found):
    return [(answer["status"], json.loads(answer["content"])) for answer in lines(found)]


def test_batched_calls_run_in_order_with_their_queries_and_bodies(server):
    finish = Call("finish", FINISH, '{"weight_version": "4"}')
    found = asyncio.run(server.ask(VERSION, PAUSE, START, finish))
    assert answers(found) == [(200, {"weight_version": "3"}), (200, {"status": "paused"}), (200, None), (200, {})]
    assert server.called == ["pause abort", "start", "finish 4"]


def test_batch_stops_after_answer_that_misses_demanded_value(server):
    server.version = "default"
    found = asyncio.run(server.ask(VERSION, PAUSE, START))
    assert answers(found) == [(200, {"weight_version": "default"})]
    assert server.called == []


def test_batch_stops_after_failed_call_and_returns_its_error(server):
    found = asyncio.run(server.ask(PAUSE, Call("finish", FINISH, '{"weight_version": "bad"}'), START))
    statuses = [answer["status"] for answer in lines(found)]
    assert statuses == [200, 500]
    assert "Internal Server Error" in lines(found)[1]["content"]
    assert server.called == ["pause abort", "finish bad"]


def test_batch_with_non_update_route_is_refused(server):
    found = asyncio.run(server.ask(PAUSE, Call("chat", "/v1/chat/completions")))
    assert found.status_code == 400
    assert server.called == []


PAUSED = PAUSE.to_wire()
BROKEN = [
    b"", b"no JSON", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000,
    *(json.dumps({"calls": calls}).encode() for calls in (None, {}, "x", [], [PAUSED] * 17, [PAUSED, 1], [PAUSED, {}])),
    *(
        json.dumps({"calls": [PAUSED, {**PAUSED, **changed}]}).encode()
        for changed in (
            {"method": None}, {"method": ["POST"]}, {"method": "PUT"}, {"body": {}}, {"body": None}, {"body": "\ud800"},
            {"demand": None}, {"demand": []}, {"demand": "x"}, {"path": 1}, {"path": "/pause?mode=\ud800"}, {"more": 1},
            {"path": "//pause"}, {"path": "/%70ause"}, {"path": "/pause/"}, {"path": "/pause#x"}, {"path": CALLS_ROUTE},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("body", BROKEN)
def test_malformed_batch_is_refused_without_any_call(server, body):
    assert asyncio.run(server.send(body)).status_code == 400
    assert server.called == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_batch_by_other_http_method_is_refused(server, method):
    assert asyncio.run(server.send(calls_to_json([PAUSE]), method=method)).status_code == 405
    assert server.called == []


def test_response_that_breaks_off_counts_as_failed_call(server):
    async def half(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"half":', "more_body": True})

    async def app(scope, receive, send):
        await (half if scope["path"] == FINISH else Stage2Routes(app))({**scope, "app": app}, receive, send)

    server.app = app
    found = asyncio.run(server.ask(Call("finish", FINISH), PAUSE))
    assert [answer["status"] for answer in lines(found)] == [500]
    assert server.called == []


def test_nested_batches_are_refused(server):
    assert asyncio.run(server.ask(Call("calls", CALLS_ROUTE, calls_to_json([PAUSE])))).status_code == 400


def test_batch_without_token_is_refused(server):
    assert asyncio.run(server.ask(PAUSE, headers={})).status_code == 401
    assert server.called == []


def test_batch_stops_when_learner_has_disconnected(server):
    async def hang_up_while_it_starts():
        server.may_start.clear()
        gone, messages = asyncio.Event(), [{"type": "http.request", "body": calls_to_json([START, PAUSE]).encode()}]

        async def receive():
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_):
            pass

        headers = [(b"authorization", b"Bearer secret")]
        scope = {"type": "http", "method": "POST", "path": CALLS_ROUTE, "query_string": b"", "headers": headers}
        asked = asyncio.ensure_future(server.app(scope, receive, send))
        await asyncio.sleep(0)
        gone.set()
        for _ in range(10):
            await asyncio.sleep(0)
        server.may_start.set()
        await asked

    asyncio.run(hang_up_while_it_starts())
    assert server.called == ["start"]


@pytest.mark.parametrize("answer", [{}, {"success": 1}, {"success": "true"}, {"success": None}, [], None, "success"])
def test_only_exact_value_meets_demand(answer):
    assert not is_met({"success": True}, answer)
    assert is_met({}, answer)
