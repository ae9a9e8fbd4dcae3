"""Errors of servers and links: whole in another process, and whether a server has refused or is lost for now."""

import pickle

import pytest

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.sync.fleet.merge_location import MergeMismatch
from stage2_trainer.sync.fleet.report import DigestError
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import LinkError, OtherGroupError, ServerError, join_errors
from tests.http_server import QuietHandler, serving

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    "error",
    [
        ServerError(URL, "push", "two\nlines", status=500),
        ServerError(URL, "health", "no answer"),
        MergeMismatch(URL, "compare digests", "other layers", status=409),
        join_errors([ServerError(URL, "push", "a", status=500), ServerError(URL, "push", "b")]),
        OtherGroupError("of-a-dead-learner", "of-this-one"),
        LinkError("the connection broke"),
        ConfigError([Problem("rlhf.beta", -1, "must be at least 0", "raise it")], unlisted=2),
        DigestError("other weights"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_after_it_crossed(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


@pytest.mark.parametrize(("answered", "status"), [(400, 400), (409, 409), (500, 500), (503, None)])
def test_a_server_that_cannot_now_is_lost_and_has_not_refused(answered: int, status: int | None) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_error(answered)

    with serving(Handler) as server, pytest.raises(ServerError, match=f"answered {answered}") as error:
        ServerClient(server.url, "token", timeout_s=10).get("/health", "connect")
    assert error.value.status == status
