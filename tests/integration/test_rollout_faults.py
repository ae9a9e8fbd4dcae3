"""What the rollout client makes of servers that fail: an error that names server, phase and request, and no hang."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan

PLAN = SeedPlan(training_seed=17, global_step=3, micro_step=0)


class Scripted:
    """A server that answers each chat request as its script says, and remembers what it was asked."""

    def __init__(self, script, versions):
        self.script = script
        self.versions = list(versions)
        self.seen = []
        self.cancelled = 0
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.get("/weight_info")(self.version)

    async def chat(self, request: Request):
        body = await request.json()
        self.seen.append(body)
        watch = asyncio.ensure_future(_disconnected(request))
        work = asyncio.ensure_future(self.script(body))
        await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self.cancelled += 1
            work.cancel()
            return PlainTextResponse("gone")
        watch.cancel()
        return work.result()

    async def version(self):
        version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        return {"weight_version": version}


async def _disconnected(request):
    while not await request.is_disconnected():
        await asyncio.sleep(0.01)


def answer(body, **changes):
    """A good answer: the prompt's text and the request's seed, as ids."""
    ids = [ord(c) for c in body["messages"][0]["content"]]
    choice = {"message": {"content": "x"}, "token_ids": [body["seed"]], "finish_reason": "stop"}
    return JSONResponse({"object": "chat.completion", "prompt_token_ids": ids, "choices": [choice], **changes})


async def good(body):
    return answer(body)


async def last_first(body):
    """Requests that were sent first are answered last."""
    await asyncio.sleep(0.3 - 0.04 * (ord(body["messages"][0]["content"]) - ord("a")))
    return answer(body)


async def never(body):
    await asyncio.sleep(60)


@pytest.fixture
def serve():
    """A function that runs a scripted server in a thread."""
    with contextlib.ExitStack() as stack:

        def start(script, versions=("3",)):
            scripted = Scripted(script, versions)
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            listener.listen()  # whoever connects before the thread serves shall wait
            server = uvicorn.Server(uvicorn.Config(scripted.app, log_level="error", timeout_graceful_shutdown=1))
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, server, "should_exit", True)
            scripted.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            return scripted

        yield start


@contextlib.contextmanager
def backend(*servers, infer_timeout_s=None):
    urls = [server if isinstance(server, str) else server.url for server in servers]
    sampling = Sampling(max_new_tokens=8, repetition_penalty=1.05)
    with ServerBackend(urls, token="t", sampling=sampling, timeout_s=5, infer_timeout_s=infer_timeout_s) as client:
        yield client


def requests(letters):
    return [RolloutRequest(messages=[{"role": "user", "content": letter}]) for letter in letters]


def test_answers_are_in_request_order_whoever_answers_first(serve):
    servers = [serve(last_first) for _ in range(3)]
    with backend(*servers) as client:
        rollouts = client.generate(requests("abcdefg"), seed_plan=PLAN, version=3)
    assert [chr(rollout.prompt_token_ids[0]) for rollout in rollouts] == list("abcdefg")
    assert [rollout.token_ids for rollout in rollouts] == [[PLAN.seed(i)] for i in range(7)]
    urls = [server.url for server in servers]
    assert [urls.index(rollout.server) for rollout in rollouts] == [0, 0, 0, 1, 1, 1, 2]


def test_requests_of_a_chunk_are_under_way_together(serve):
    together = []

    async def wait_for_the_others(body):
        together.append(body)
        while len(together) < 5:  # answered one after the other, the first would wait for ever
            await asyncio.sleep(0.01)
        return answer(body)

    with backend(serve(wait_for_the_others), infer_timeout_s=50) as client:
        assert len(client.generate(requests("abcde"), seed_plan=PLAN)) == 5


def test_the_request_carries_the_sampling_and_its_own_seed(serve):
    server = serve(good)
    with backend(server) as client:
        client.generate(requests("ab"), seed_plan=PLAN)
    assert sorted(body["seed"] for body in server.seen) == [3000026, 3000027]
    assert {body["repetition_penalty"] for body in server.seen} == {1.05}


async def refuse(body):
    return JSONResponse({"error": {"message": "cache exhausted"}}, status_code=503)


async def error_object(body):
    return JSONResponse({"object": "error", "message": "no"})


async def no_ids(body):
    return answer(body, prompt_token_ids=None)


async def two_answers(body):
    choice = {"message": {"content": "x"}, "token_ids": [1], "finish_reason": "stop"}
    return answer(body, choices=[choice, choice])


async def not_json(body):
    return PlainTextResponse("<html>proxy</html>")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (refuse, "answered 503.*cache exhausted"),
        (error_object, "unusable answer: object"),
        (no_ids, "unusable answer: prompt_token_ids"),
        (two_answers, "unusable answer: choices"),
        (not_json, "unusable answer:.*JSON"),
    ],
)
def test_a_bad_answer_names_server_phase_and_request(serve, script, said):
    async def bad_for_c(body):
        return await (script if body["messages"][0]["content"] == "c" else good)(body)

    first, second = serve(good), serve(bad_for_c)
    with backend(first, second) as client, pytest.raises(ServerError, match=said) as caught:
        client.generate(requests("abcd"), seed_plan=PLAN)
    assert (caught.value.server, caught.value.phase) == (second.url, "rollout")
    assert "request 2" in caught.value.detail


def test_a_request_that_takes_too_long_is_given_up(serve):
    with backend(serve(never), infer_timeout_s=0.3) as client, pytest.raises(ServerError, match="no answer in time"):
        client.generate(requests("a"), seed_plan=PLAN)


def test_when_one_server_fails_the_requests_of_the_others_are_cancelled(serve):
    slow = serve(never)

    async def refuse_once_the_other_is_busy(body):
        while not slow.seen:
            await asyncio.sleep(0.01)
        return await refuse(body)

    broken = serve(refuse_once_the_other_is_busy)
    with backend(slow, broken) as client, pytest.raises(ServerError, match="503"):
        client.generate(requests("ab"), seed_plan=PLAN)
    while not slow.cancelled:
        time.sleep(0.02)
    assert slow.cancelled == 1


def test_a_server_that_is_not_there_is_named(serve):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with backend(serve(good), gone) as client, pytest.raises(ServerError, match="ClientConnectorError") as caught:
        client.generate(requests("ab"), seed_plan=PLAN)
    assert caught.value.server == gone


def test_a_server_without_weights_is_refused(serve):
    with backend(serve(good, ["default"])) as client, pytest.raises(ServerError, match="weight version -1, not 3"):
        client.generate(requests("a"), seed_plan=PLAN, version=3)


def test_weights_that_change_during_generation_are_noticed(serve):
    with backend(serve(good, ["3", "4"])) as client, pytest.raises(ServerError, match="from weight version 3 to 4"):
        client.generate(requests("a"), seed_plan=PLAN, version=3)


def test_the_next_call_after_a_failure_is_answered(serve):
    answers = iter([refuse, good])

    async def first_refuse(body):
        return await next(answers)(body)

    with backend(serve(first_refuse)) as client:
        with pytest.raises(ServerError, match="503"):
            client.generate(requests("a"), seed_plan=PLAN)
        assert len(client.generate(requests("a"), seed_plan=PLAN)) == 1


def test_proxies_of_the_environment_are_ignored_for_loopback(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with backend(serve(good)) as client:
        assert len(client.generate(requests("a"), seed_plan=PLAN)) == 1
