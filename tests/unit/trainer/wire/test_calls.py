"""Calls made in order, as the learner asks for them: whatever a server answers is read, or an error of that server."""

import contextlib
import json
import time

import pytest

from stage2_trainer.wire.calls import Call
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from tests.support.http_server import QuietHandler, serving
from tests.support.patience import crowding

PATIENCE_S = 60.0
RESET = Call("reset caches", "/reset_prefix_cache", demand={"success": True})
CALLS = [Call("pause", "/pause"), RESET, Call("resume", "/resume")]
WELL = {"status": 200, "content": "{}"}
DONE = {"status": 200, "content": '{"success": true}'}


class Handler(QuietHandler):
    """Answers `server.parts`, each of them bytes or seconds to wait."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.server.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the learner has given up, as some tests want
            for part in (*self.server.parts, b""):
                if isinstance(part, float):
                    time.sleep(part)  # by the clock: the test says how long it takes
                else:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.close_connection = True


@pytest.fixture
def ask():
    """A function that returns the outcome of calls to a server that answers these parts."""
    with serving(Handler) as server:

        def answered(*parts, status=200, timeout_s=PATIENCE_S):
            server.parts, server.status = parts, status
            return ServerClient(server.url, "token", timeout_s=timeout_s).in_order("finish", CALLS)

        yield answered


def line(answer):
    return json.dumps(answer).encode() + b"\n"


def test_answers_are_read_line_by_line_in_any_chunks(ask):
    whole = line(WELL) + line(DONE) + line(WELL)
    assert ask(whole) == [{}, {"success": True}, {}]
    assert ask(*(whole[at : at + 1] for at in range(len(whole)))) == [{}, {"success": True}, {}]


def test_timeout_applies_to_each_call_separately(ask):
    wait = 4.0  # three of these are too long, and a busy machine may add more than as much again to each
    assert len(ask(wait, line(WELL), wait, line(DONE), wait, line(WELL), timeout_s=10.0)) == len(CALLS)


def test_unanswered_call_is_named_in_timeout_error(ask):
    with pytest.raises(ServerError, match=r"POST /resume: no answer in time") as caught:
        ask(line(WELL), line(DONE), PATIENCE_S, timeout_s=2.0 * crowding())
    assert caught.value.phase == "resume"


def test_unmet_demand_ends_answers(ask):
    assert ask(line(WELL), line({"status": 200, "content": '{"success": false}'})) == [{}, {"success": False}]


@pytest.mark.parametrize(
    ("answers", "phase"),
    [
        ([WELL, {"status": 200, "content": '{"success": false}'}, WELL], "reset caches"),
        ([WELL], "pause"),
        ([], "pause"),
        ([WELL, DONE, WELL, WELL], "finish"),
        ([WELL, {"status": 500, "content": "a bug"}], "reset caches"),
        *(([WELL, strange], "reset caches") for strange in (1, None, [1, 2], {}, {"status": 200}, {"content": "{}"})),
        *(
            ([WELL, {**DONE, **strange}], "reset caches")
            for strange in ({"status": None}, {"status": "x"}, {"status": 1e999}, {"status": True}, {"content": 7})
        ),
        ([WELL, {"status": 200, "content": "\ud800"}], "reset caches"),
        ([WELL, {"status": 200, "content": "[]"}], "reset caches"),
    ],
)
def test_unexpected_answer_is_server_error(ask, answers, phase):
    with pytest.raises(ServerError) as caught:
        ask(*map(line, answers))
    assert caught.value.phase == phase


@pytest.mark.parametrize("parts", [(line(WELL)[:-1],), (b"\xff\n",), (b"[" * 100_000 + b"\n",), (b" " * 2**20,) * 9])
def test_malformed_answer_line_is_server_error(ask, parts):
    with pytest.raises(ServerError):
        ask(*parts)


def test_missing_calls_route_is_reported_as_version_mismatch(ask):
    with pytest.raises(ServerError, match="the same version of stage2") as caught:
        ask(b"{}", status=404)
    assert caught.value.status is None, "another try meets the same server, perhaps after an upgrade"
