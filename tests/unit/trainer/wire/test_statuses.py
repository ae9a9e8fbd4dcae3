"""What a learner takes for a refusal of a server, and what for a server that is lost for now."""

from __future__ import annotations

import pytest

from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from tests.http_server import QuietHandler, serving


@pytest.mark.parametrize(("answered", "status"), [(400, 400), (409, 409), (500, 500), (503, None)])
def test_a_server_that_cannot_now_is_lost_and_has_not_refused(answered: int, status: int | None) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_error(answered)

    with serving(Handler) as server, pytest.raises(ServerError, match=f"answered {answered}") as error:
        ServerClient(server.url, "token", timeout_s=10).get("/health", "connect")
    assert error.value.status == status
