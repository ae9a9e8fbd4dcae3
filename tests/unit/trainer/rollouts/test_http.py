"""The client of several servers, against a server that counts its connections."""

import json
import threading

import pytest

from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan
from tests.http_server import QuietHandler, serving

ANSWER = {
    "object": "chat.completion",
    "prompt_token_ids": [1],
    "choices": [{"message": {"content": "{}"}, "token_ids": [2], "finish_reason": "stop"}],
}


class Handler(QuietHandler):
    """Version 0 and one answer; connections are kept open, as uvicorn keeps them."""

    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.opened.release()

    def finish(self):
        super().finish()
        self.server.closed.release()

    def do_GET(self):
        self._say({"weight_version": "0"})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(ANSWER)

    def _say(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server():
    with serving(Handler) as http:
        http.opened, http.closed = threading.Semaphore(0), threading.Semaphore(0)
        yield http


def backend_of(server):
    return ServerBackend([server.url], token="t", sampling=Sampling(max_new_tokens=4), timeout_s=10)


def test_a_closed_backend_leaves_no_connection_open(server):
    backend = backend_of(server)
    plan = SeedPlan(training_seed=0, global_step=0, micro_step=0)
    (rollout,) = backend.generate([RolloutRequest(messages=[])], seed_plan=plan, version=0)
    assert rollout.token_ids == [2]
    assert server.opened.acquire(timeout=10)
    assert not server.closed.acquire(blocking=False)  # kept for the next step
    backend.close()
    assert server.closed.acquire(timeout=10)
