"""No route of a server but /health is reached without the token, however the request is written."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from stage2_api.errors import ConfigError
from stage2_trainer.serve.guard import TokenGuard
from tests.red_team.in_pod import DISGUISES, HEADERS, ROUTES, SMUGGLED, exchange, request
from tests.support.patience import Patience

TOKEN = "a-token-of-some-length"


@pytest.fixture
def client(tmp_path, monkeypatch):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("STAGE2_TOKEN_FILE", str(tmp_path / "token"))
    app = FastAPI()
    app.add_middleware(TokenGuard)

    @app.get("/health")
    @app.get("/health/deep")
    @app.post("/update_weights")
    async def answer() -> str:
        return "in"

    @app.websocket("/stream")
    async def stream(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("in")
        await socket.close()

    return TestClient(app)


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def test_health_route_needs_no_token(client):
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(TOKEN[:-1]),
        bearer(""),
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
    ],
)
def test_every_other_route_needs_token(client, headers):
    assert client.post("/update_weights", headers=headers).status_code == 401
    assert client.get("/health/deep", headers=headers).status_code == 401
    assert client.get("/docs", headers=headers).status_code == 401
    assert client.options("/update_weights", headers=headers).status_code == 401


def test_second_authorization_header_is_refused(client):
    both = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer another")]
    assert client.post("/update_weights", headers=both).status_code == 401


def test_request_with_token_is_accepted(client):
    assert client.post("/update_weights", headers=bearer(TOKEN)).json() == "in"


def test_websocket_needs_token(client):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/stream"):
        pass
    with client.websocket_connect("/stream", headers=bearer(TOKEN)) as socket:
        assert socket.receive_text() == "in"


def test_websocket_at_health_path_needs_token(client):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/health"):
        pass


def test_guard_without_token_file_is_refused(monkeypatch):
    monkeypatch.delenv("STAGE2_TOKEN_FILE", raising=False)
    with pytest.raises(ConfigError, match="STAGE2_TOKEN_FILE"):
        TokenGuard(FastAPI())


# Byte for byte, over real HTTP

HOST = "127.0.0.1"
HEADER_IDS = ["without a header", *(header[:30] for header in HEADERS)]


async def inside(scope: Any, receive: Any, send: Any) -> None:
    """An app that has every route, and tells of each that it was reached."""
    if scope["type"] != "http":
        return
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    body = f"inside {scope['method']} {scope['path']}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of that app behind the guard, served as vLLM is."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("STAGE2_TOKEN_FILE", str(token))
        app = TokenGuard(inside)
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    patience = Patience(30)
    while not server.started and not patience.ended():
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("header", ["", *HEADERS], ids=HEADER_IDS)
@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[" ".join(route) for route in ROUTES])
def test_every_route_of_running_server_is_closed_without_token(port: int, method: str, path: str, header: str) -> None:
    answer = exchange(HOST, port, request(method, path, header), tls=False)
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"inside" not in answer


@pytest.mark.parametrize("path", DISGUISES)
def test_disguised_route_is_closed_without_token(port: int, path: str) -> None:
    answer = exchange(HOST, port, request("GET", path), tls=False)
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"inside" not in answer


def test_smuggled_request_is_not_answered(port: int) -> None:
    answer = exchange(HOST, port, SMUGGLED, tls=False)
    assert answer.startswith(b"HTTP/1.1 ")
    assert b"/v1/models" not in answer


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[" ".join(route) for route in ROUTES])
def test_every_route_of_running_server_is_open_with_token(port: int, method: str, path: str) -> None:
    answer = exchange(HOST, port, request(method, path, f"Authorization: Bearer {TOKEN}"), tls=False)
    assert f"inside {method} {path}".encode() in answer
