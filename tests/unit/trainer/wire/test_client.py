"""Errors of servers and links, whole in another process, and calls to all servers at once.

The first of many servers that stand still would keep the others waiting.
"""

import contextlib
import pickle
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from stage2_api.errors import ConfigError, Problem
from stage2_api.vllm import ServerAddress
from stage2_trainer.process.background import all_at_once
from stage2_trainer.rollouts import build
from stage2_trainer.sync.fleet.merge_location import FOLDERS_AGREE, MergeMismatch
from stage2_trainer.sync.fleet.push import FullPush
from stage2_trainer.sync.fleet.report import DigestError
from stage2_trainer.wire import client
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import LinkError, OtherGroupError, ServerError, join_errors
from tests.support.http_server import QuietHandler, serving
from tests.support.patience import crowding

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
def test_error_is_unchanged_after_pickling(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


@pytest.mark.parametrize(("answered", "status"), [(400, 400), (409, 409), (500, 500), (503, None)])
def test_status_503_counts_as_lost_server_and_others_as_refusal(answered: int, status: int | None) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_error(answered)

    with serving(Handler) as server, pytest.raises(ServerError, match=f"answered {answered}") as error:
        ServerClient(server.url, "token", timeout_s=10).get("/health", "connect")
    assert error.value.status == status


def test_deadline_covers_whole_call() -> None:
    patience_s = 2.0 * crowding()

    class Handler(QuietHandler):
        """Answers the head in time, and the body in time again."""

        def do_GET(self) -> None:
            time.sleep(0.7 * patience_s)  # by the clock: the sum of both is too long
            self.send_response(200)
            self.end_headers()
            time.sleep(0.7 * patience_s)  # by the clock: as above
            with contextlib.suppress(ConnectionError):  # the learner has given up
                self.wfile.write(b"{}")

    with serving(Handler) as server, pytest.raises(ServerError, match="GET /weight_info: no answer in time"):
        ServerClient(server.url, "token", timeout_s=patience_s).get("/weight_info", "version")


COUNT = 5
URLS = [f"http://127.0.0.1:{port}" for port in range(1, 1 + COUNT)]


@pytest.fixture
def meet():
    """A call that returns once it runs for all servers."""
    barrier = threading.Barrier(COUNT)
    return lambda *_, **__: barrier.wait(20)


def test_parallel_results_keep_order_and_first_failure_is_raised():
    assert all_at_once(str, range(30)) == [str(i) for i in range(30)]
    with pytest.raises(ZeroDivisionError):
        all_at_once(lambda i: 1 // i, [1, 0])


def test_all_servers_are_asked_for_health_in_parallel(meet, monkeypatch):
    def get(client, path, phase):
        meet()
        return {"weight_version": "3"}

    monkeypatch.setattr(client.ServerClient, "get", get)
    client.wait_until_healthy(URLS, "t", timeout_s=60)
    client.wait_until_healthy(URLS, "t")


def test_unhealthy_servers_are_named(meet, monkeypatch):
    def get(client, path, phase):
        meet()
        if client.base_url in URLS[1:3]:
            raise ServerError(client.base_url, phase, "no answer in time")

    monkeypatch.setattr(client.ServerClient, "get", get)
    with pytest.raises(ServerError, match=rf"{URLS[1]}.*not healthy within 0 s.*{URLS[2]}") as caught:
        client.wait_until_healthy(URLS, "t", timeout_s=0)
    assert URLS[0] not in str(caught.value)


def test_all_servers_are_checked_for_identity_in_parallel(meet, monkeypatch):
    monkeypatch.setattr(build, "describe", lambda processor: {})
    monkeypatch.setattr(build, "_differences", lambda *_: [] if meet() >= 0 else None)
    build.check_identity([SimpleNamespace(base_url=url) for url in URLS], None, [], [1])


def test_all_server_model_folders_are_compared_in_parallel(meet, monkeypatch):
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
    addresses = [ServerAddress(url, 1) for url in URLS]
    sync = FullPush(addresses, token="t", timeout_s=60, device=torch.device("cpu"))
    monkeypatch.setattr(sync.location, "compare_folder", meet)
    sync.choose_location(model)
    assert (sync.planned().merge, sync.planned().merge_reason) == ("server", FOLDERS_AGREE)
