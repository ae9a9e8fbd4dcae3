"""What a server answers is read with a bound, uncompressed, and reported in one line: for both clients of a server."""

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from stage2_trainer.rollouts import http
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire import client
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan
from tests.support.http_server import QuietHandler, serving
from tests.support.patience import crowding

LIMIT = 1 << 16
VERSION = json.dumps({"weight_version": "0"}).encode()


@dataclass
class Answer:
    """What the server answers, and how much of it has gone out. drips: the method that it answers byte by byte."""

    body: bytes = VERSION
    status: int = 200
    encoding: str = ""
    endless: bool = False
    drips: str = ""
    sent: int = 0


class Handler(QuietHandler):
    """Answers everything alike."""

    def do_GET(self):
        answer = self.server.answer
        self.send_response(answer.status)
        if answer.encoding:
            self.send_header("Content-Encoding", answer.encoding)
        self.end_headers()
        self.wfile.write(answer.body)
        while answer.drips == self.command:  # until the client hangs up
            time.sleep(0.02)
            answer.sent += self.wfile.write(b" ")
        while answer.endless and answer.sent < 1 << 30:
            answer.sent += self.wfile.write(b" " * 65536)

    do_POST = do_GET


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", LIMIT)
    with serving(Handler) as listening:
        listening.answer = Answer()
        yield listening


def ask_for_rollouts(url, timeout_s):
    with ServerBackend([url], token="", sampling=Sampling(max_new_tokens=4), timeout_s=timeout_s) as backend:
        request = RolloutRequest(messages=[{"role": "user", "content": "."}])
        backend.generate([request], seed_plan=SeedPlan(training_seed=0, global_step=0, micro_step=0))


def ask_for_the_version(url, timeout_s):
    ServerClient(url, "t", timeout_s=timeout_s)._request("GET", "/weight_info", "version", limit=LIMIT)


Ask = Callable[[str, float], None]


@pytest.fixture(params=[ask_for_rollouts, ask_for_the_version], ids=["rollouts", "control"])
def refused(request, server):
    def ask(answer: Answer, *, timeout_s: float = 20.0) -> str:
        server.answer = answer
        with pytest.raises(ServerError) as error:
            request.param(server.url, timeout_s)
        return str(error.value)

    return ask


def test_endless_response_is_cut_off_at_size_limit(refused):
    answer = Answer(endless=True)
    assert f"answered more than {LIMIT} bytes" in refused(answer)
    assert answer.sent < 64 << 20  # what sockets buffer, and no more


def test_slowly_dripping_response_is_cut_off_at_deadline(refused):
    answer = Answer(drips="GET")
    assert "no answer in time" in refused(answer, timeout_s=2.0 * crowding())
    assert answer.sent > 0


def test_dripping_rollout_response_is_cut_off_at_deadline(server):
    server.answer = Answer(drips="POST")
    with pytest.raises(ServerError, match="request 0: no answer in time"):
        ask_for_rollouts(f"http://127.0.0.1:{server.server_port}", 0.5)


def test_compressed_response_is_refused(refused):
    assert "encoding 'gzip', which was not requested" in refused(Answer(gzip.compress(VERSION), encoding="gzip"))


def test_error_body_is_escaped_into_one_line(refused):
    message = refused(Answer(b'no\n{"event": "reproducibility"}\x1b[2J', status=500))
    assert r'answered 500: no\n{"event": "reproducibility"}\x1b[2J' in message


def test_long_error_body_is_shortened(refused):
    assert len(refused(Answer("é".encode() * 20_000, status=502))) < client.MAX_ERROR_CHARS + 200
