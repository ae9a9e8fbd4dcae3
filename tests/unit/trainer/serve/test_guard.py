"""The guard lets nobody past /health without the token."""

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from stage2_api.errors import ConfigError
from stage2_trainer.serve.guard import TokenGuard

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


def test_health_is_open(client):
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
def test_every_other_route_demands_the_token(client, headers):
    assert client.post("/update_weights", headers=headers).status_code == 401
    assert client.get("/health/deep", headers=headers).status_code == 401
    assert client.get("/docs", headers=headers).status_code == 401
    assert client.options("/update_weights", headers=headers).status_code == 401


def test_a_second_header_beside_the_token_is_refused(client):
    both = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer another")]
    assert client.post("/update_weights", headers=both).status_code == 401


def test_the_token_opens(client):
    assert client.post("/update_weights", headers=bearer(TOKEN)).json() == "in"


def test_a_websocket_needs_the_token_too(client):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/stream"):
        pass
    with client.websocket_connect("/stream", headers=bearer(TOKEN)) as socket:
        assert socket.receive_text() == "in"


def test_a_websocket_called_health_is_not_the_health_route(client):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/health"):
        pass


def test_no_guard_stands_without_a_token(monkeypatch):
    monkeypatch.delenv("STAGE2_TOKEN_FILE", raising=False)
    with pytest.raises(ConfigError, match="STAGE2_TOKEN_FILE"):
        TokenGuard(FastAPI())
