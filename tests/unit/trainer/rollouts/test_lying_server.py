"""A server that lies: whatever it answers for a rollout is an error of that server, or a rollout to learn from.

Never anything else: no traceback of a parser, no hang, no answer that is taken for another one's.
"""

import copy
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from stage2_trainer.matching import CoordVocab, MatchOptions, build_target, ground_truth
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan
from tests.support.http_server import AnsweringHandler, answering, serving

TINY = Path(__file__).parents[4] / "examples" / "tiny-qwen3-vl"
TRUTH = ground_truth({"object_1": {"desc": "cat", "bbox_2d": [1, 2, 3, 4]}})
TRUE: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "prompt_token_ids": [1, 2, 3],
    "choices": [{"index": 0, "message": {"content": "{}"}, "token_ids": [90, 92], "finish_reason": "stop"}],
}


def choice(**fields: Any) -> bytes:
    """The true answer, but for these fields of its choice; None leaves one out."""
    made = copy.deepcopy(TRUE)
    made["choices"][0] |= fields
    made["choices"][0] = {key: value for key, value in made["choices"][0].items() if value is not None}
    return json.dumps(made).encode()


def answer(**fields: Any) -> bytes:
    """The true answer, but for these fields."""
    return json.dumps({**TRUE, **fields}).encode()


NO_JSON = "answer: Invalid JSON"
REFUSED: dict[str, tuple[bytes, str]] = {  # an answer, and the field that the error names
    "nothing": (b"", NO_JSON),
    "no JSON": (b"<html>ok</html>", NO_JSON),
    "half of it": (answer()[:40], NO_JSON),
    "two answers": (answer() + answer(), NO_JSON),
    "a list": (b"[]", "answer"),
    "a number beyond any float": (b"1e999999", "answer"),
    "not UTF-8": (b'{"object": "\xff\xfe"}', NO_JSON),
    "nested 100,000 deep": (b"[" * 100_000 + b"]" * 100_000, NO_JSON),
    "another object": (answer(object="list"), "object"),
    "an error with status 200": (b'{"error": {"message": "no"}}', "object"),
    "a prompt of no ids": (answer(prompt_token_ids=[]), "prompt_token_ids"),
    "a prompt of words": (answer(prompt_token_ids=["a", "b"]), "prompt_token_ids.0"),
    "a prompt of truths": (answer(prompt_token_ids=[True, False]), "prompt_token_ids.0"),
    "no prompt": (answer(prompt_token_ids=None), "prompt_token_ids"),
    "no choice": (answer(choices=[]), "choices"),
    "two choices": (answer(choices=TRUE["choices"] * 2), "choices"),
    "a choice that is text": (answer(choices=["{}"]), "choices.0"),
    "no ids": (choice(token_ids=None), "choices.0.token_ids"),
    "ids as text": (choice(token_ids="90 92"), "choices.0.token_ids"),
    "an id as text": (choice(token_ids=["90"]), "choices.0.token_ids.0"),
    "ids as numbers with a point": (choice(token_ids=[90.0, 92.5]), "choices.0.token_ids.0"),
    "an id that is not a number": (choice(token_ids=[float("nan")]), "choices.0.token_ids.0"),
    "no end": (choice(finish_reason=None), "choices.0.finish_reason"),
    "an end that nobody knows": (choice(finish_reason="abort"), "choices.0.finish_reason"),
    "an end that is a tool's": (choice(finish_reason="tool_calls"), "choices.0.finish_reason"),
    "no message": (choice(message=None), "choices.0.message"),
    "no content": (choice(message={"content": None}), "choices.0.message.content"),
    "content of another kind": (choice(message={"content": [{"type": "text"}]}), "choices.0.message.content"),
}
TAKEN: dict[str, bytes] = {
    "the truth": answer(),
    "no token at all": choice(token_ids=[]),
    "ids below the vocabulary": choice(token_ids=[90, -1, 92]),
    "ids beyond the vocabulary": choice(token_ids=[90, 10**9, 92]),
    "ids beyond any machine's integers": choice(token_ids=[90, 10**30]),
    "text that is not that of the ids": choice(message={"content": "something else"}),
    "text with half a character": choice(message={"content": "\ud83d"}).replace(b"\\ud83d", b"?"),
    "fields that nobody asked for": answer(run="rm -rf /", choices=[{**TRUE["choices"][0], "logprobs": {"a": 1}}]),
    "a field twice": answer().replace(b'"id"', b'"object": "chat.completion", "id"'),
}
RAW: dict[str, bytes] = {
    "no HTTP": b"220 mail.example ESMTP\r\n",
    "a status that is no number": b"HTTP/1.1 OK fine\r\n\r\n",
    "a line without end": b"HTTP/1.1 200 " + b"x" * 200_000,
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % index for index in range(50_000)),
    "a length that it does not keep": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{}",
    "a length below zero": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a chunk of no size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "nothing": b"",
}


class Handler(AnsweringHandler):
    """Reports its version truly, and answers a chat request with what the test wants: an answer, or raw bytes."""

    def do_POST(self) -> None:
        raw, response = self.server.response  # type: ignore[attr-defined]
        if not raw:
            super().do_POST()
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        self.connection.sendall(response)
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


@pytest.fixture(scope="module")
def server():
    with serving(Handler) as listening:
        listening.answer = lambda path, body: (200, {"weight_version": "0"} if body is None else listening.response[1])
        yield listening


@pytest.fixture
def outcome_of(server) -> Callable[..., Any]:
    """A function that returns the outcome of a request when the server answers with the given bytes."""

    def ask(response: bytes, *, raw: bool = False) -> Any:
        server.response = raw, response
        with ServerBackend([server.url], token="t", sampling=Sampling(max_new_tokens=4), timeout_s=10) as backend:
            request = RolloutRequest(messages=[{"role": "user", "content": "."}])
            plan = SeedPlan(training_seed=0, global_step=0, micro_step=0)
            return backend.generate([request], seed_plan=plan)[0]

    return ask


@pytest.fixture(scope="module")
def vocab():
    return CoordVocab.from_tokenizer(AutoTokenizer.from_pretrained(TINY))


@pytest.mark.parametrize(("response", "field"), REFUSED.values(), ids=REFUSED)
def test_invalid_rollout_response_is_server_error_naming_field(outcome_of, response, field):
    with pytest.raises(ServerError, match=f"request 0: unusable answer: {field}: .+") as error:
        outcome_of(response)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("response", TAKEN.values(), ids=TAKEN)
def test_every_accepted_rollout_response_gives_target(outcome_of, vocab, response):
    rollout = outcome_of(response)
    target = build_target(rollout.token_ids, TRUTH, vocab, MatchOptions())
    assert all(0 <= one < vocab.size for one in target.y_train_ids)


@pytest.mark.parametrize("response", RAW.values(), ids=RAW)
def test_malformed_http_response_is_server_error(outcome_of, response):
    with pytest.raises(ServerError, match="request 0"):
        outcome_of(response, raw=True)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(server, outcome_of, status):
    reached = []
    with answering(lambda path, body: reached.append(path) or (200, TRUE)) as thief:
        redirect = f"HTTP/1.1 {status} T\r\nLocation: {thief.url}/\r\nContent-Length: 0\r\n\r\n".encode()
        with pytest.raises(ServerError, match=f"request 0 answered {status}"):
            outcome_of(redirect, raw=True)
        with pytest.raises(ServerError, match=f"POST /pause answered {status}"):
            ServerClient(server.url, "t", timeout_s=10).post("/pause", "begin")
    assert reached == []
