"""What a learner takes for a refusal of a server, and what for a server that is lost for now."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError


@pytest.mark.parametrize(("answered", "status"), [(400, 400), (409, 409), (500, 500), (503, None)])
def test_a_server_that_cannot_now_is_lost_and_has_not_refused(answered: int, status: int | None) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(answered)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(ServerError, match=f"answered {answered}") as error:
                ServerClient(f"http://127.0.0.1:{server.server_port}", "token", timeout_s=10).get("/health", "connect")
        finally:
            server.shutdown()
    assert error.value.status == status
