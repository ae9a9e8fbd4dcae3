"""The rollout client on several servers: order, sampling, and errors that name server, phase and request."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from stage2_trainer.rollouts import http
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan
from tests.support.http_server import AnsweringHandler, answering, serving
from tests.support.ports import free_port

PLAN = SeedPlan(training_seed=17, global_step=3, micro_step=0)
WAIT_S = 60


def good(body):
    """The prompt's text and the request's seed, as ids."""
    choice = {"message": {"content": "x"}, "token_ids": [body["seed"]], "finish_reason": "stop"}
    return 200, {"object": "chat.completion", "prompt_token_ids": [ord(letter(body))], "choices": [choice]}


def refuse(body):
    return 503, {"error": {"message": "cache exhausted"}}


def letter(body):
    return body["messages"][0]["content"]


@pytest.fixture
def serve():
    """A function that starts a server with a script for chat requests; it reports its versions in turn."""
    with ExitStack() as stack:

        def start(script=good, versions=("3",)):
            left = list(versions)

            def answer(path, body):
                if path == "/weight_info":
                    return 200, {"weight_version": left.pop(0) if len(left) > 1 else left[0]}
                return script(body)

            return stack.enter_context(answering(answer))

        yield start


@contextmanager
def backend(*servers, timeout_s=WAIT_S, **options):
    urls = [server if isinstance(server, str) else server.url for server in servers]
    sampling = Sampling(max_new_tokens=8, repetition_penalty=1.05)
    with ServerBackend(urls, token="t", sampling=sampling, timeout_s=timeout_s, **options) as client:
        yield client


def requests(letters):
    return [RolloutRequest(messages=[{"role": "user", "content": one}]) for one in letters]


def test_answers_keep_request_order(serve):
    arrived = {letter: threading.Event() for letter in "abcdefgh"}
    arrived["h"].set()

    def last_first(body):
        assert arrived[chr(ord(letter(body)) + 1)].wait(WAIT_S)
        return good(body)

    def note(index, rollout):
        arrived["abcdefg"[index]].set()

    servers = [serve(last_first) for _ in range(3)]
    with backend(*servers) as client:
        rollouts = client.generate(requests("abcdefg"), seed_plan=PLAN, version=3, on_rollout=note)
    assert [chr(rollout.prompt_token_ids[0]) for rollout in rollouts] == list("abcdefg")
    assert [rollout.token_ids for rollout in rollouts] == [[PLAN.seed(i)] for i in range(7)]
    urls = [server.url for server in servers]
    assert [urls.index(rollout.server) for rollout in rollouts] == [0, 0, 0, 1, 1, 1, 2]


def test_requests_of_chunk_are_sent_concurrently(serve):
    together = threading.Barrier(5, timeout=WAIT_S)  # answered one after the other, the first would wait for ever

    def wait_for_the_others(body):
        together.wait()
        return good(body)

    with backend(serve(wait_for_the_others), infer_timeout_s=50) as client:
        assert len(client.generate(requests("abcde"), seed_plan=PLAN)) == 5


def test_request_carries_sampling_options_and_own_seed(serve):
    seen = []
    with backend(serve(lambda body: seen.append(body) or good(body))) as client:
        client.generate(requests("ab"), seed_plan=PLAN)
    assert sorted(body["seed"] for body in seen) == [3000026, 3000027]
    assert {body["repetition_penalty"] for body in seen} == {1.05}


def test_error_response_names_server_phase_and_request(serve):
    only = serve(lambda body: (refuse if letter(body) == "c" else good)(body))
    with (
        backend(only) as client,
        pytest.raises(ServerError, match=r"request 2 answered 503.*cache exhausted") as caught,
    ):
        client.generate(requests("abcd"), seed_plan=PLAN)
    assert (caught.value.server, caught.value.phase) == (only.url, "rollout")


class Silent(AnsweringHandler):
    """Never answers a chat request, and notices when its client hangs up."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.set()
        if not self.connection.recv(1):
            self.server.hung_up.set()
        self.close_connection = True


@pytest.fixture
def silent():
    with serving(Silent) as server:
        server.answer = lambda path, body: (200, {"weight_version": "3"})
        server.asked, server.hung_up = threading.Event(), threading.Event()
        yield server


def test_request_times_out(silent):
    limits = {"infer_timeout_s": 0.3}  # by the clock: the server never answers
    with backend(silent, **limits) as client, pytest.raises(ServerError, match="no answer in time"):
        client.generate(requests("a"), seed_plan=PLAN)


def test_requests_of_lost_server_are_answered_by_others_with_same_seeds(serve):
    answered = threading.Event()

    def then_refuse(body):
        return good(body) if letter(body) == "a" and not answered.set() else answered.wait(WAIT_S) and refuse(body)

    lost, fit, seen = serve(then_refuse), [serve(), serve()], {}
    with backend(lost, fit[0], gone(), fit[1]) as client:
        found = client.generate(requests("abcdefgh"), seed_plan=PLAN, version=3, on_rollout=seen.__setitem__)
        assert client.lost == {lost.url, client.base_urls[2]}
        assert [one.token_ids for one in found] == [[PLAN.seed(i)] for i in range(8)]
        assert {one.server for one in found} == {one.url for one in fit}, "not even what it had answered counts"
        assert seen == dict(enumerate(found)), "the last answer to each request"
        again = client.generate(requests("ab"), seed_plan=PLAN, version=3)
    assert {one.server for one in again} == {one.url for one in fit}, "it is asked nothing before the next push"


def test_request_that_fails_on_three_servers_is_not_sent_to_fourth(serve):
    def fall(body):
        return refuse(body) if letter(body) == "b" else good(body)

    with backend(*(serve(fall) for _ in range(5))) as client:
        with pytest.raises(ServerError, match="request 1 answered 503") as caught:
            client.generate(requests("abcde"), seed_plan=PLAN)
        assert caught.value.servers == client.lost
        assert len(client.lost) == 3


def test_faster_server_gets_more_requests(serve):
    arrived, both = [], threading.Event()

    def slow(body):
        """Takes three times as long as both answers of the other one take to arrive."""
        start = time.monotonic()
        assert both.wait(WAIT_S)
        time.sleep(2 * (time.monotonic() - start))  # by the clock: three times as long as the other one
        return good(body)

    def note(index, rollout):
        arrived.append(index)
        if len(arrived) == 2:
            both.set()

    servers = [serve(slow), serve()]
    with backend(*servers) as client:
        client.generate(requests("abcd"), seed_plan=PLAN, on_rollout=note)
        found = client.generate(requests("abcdefgh"), seed_plan=PLAN)
        assert not client.lost
    assert sum(one.server == servers[1].url for one in found) > 4


def test_requests_with_longest_expected_answers_are_sent_first(serve, caplog):
    begun = []
    servers = [serve(lambda body, name=name: begun.append((name, letter(body))) or good(body)) for name in "xy"]
    with caplog.at_level("INFO"), backend(*servers, in_flight=1) as client:
        found = client.generate(requests("abcdef"), seed_plan=PLAN, version=3, expected=[1, 2, 3, 50, 40, 30])
    assert [one for server, one in begun if server == "x"] == list("dcba")
    assert [one for server, one in begun if server == "y"] == list("ef")
    assert [one.token_ids for one in found] == [[PLAN.seed(i)] for i in range(6)], "order and seeds are the requests'"
    assert f"server {servers[0].url} requests 0..3; server {servers[1].url} requests 4..5" in caplog.text


def gone():
    """The address of a server that is not there."""
    return f"http://127.0.0.1:{free_port()}"


def test_unreachable_server_is_named_in_error():
    with backend(gone()) as client, pytest.raises(ServerError, match="ClientConnectorError") as caught:
        client.generate(requests("ab"), seed_plan=PLAN)
    assert caught.value.server == client.base_urls[0]


@pytest.mark.parametrize(
    ("versions", "message"),
    [(["default"], "version -1, not 3"), (["4"], "version 4, not 3"), (["3", "4"], "from weight version 3 to 4")],
)
def test_answer_from_other_weight_version_is_refused(serve, versions, message):
    with backend(serve(good, versions)) as client, pytest.raises(ServerError, match=message):
        client.generate(requests("a"), seed_plan=PLAN, version=3)


def test_requests_in_flight_per_server_are_limited(serve):
    under_way, most, two = [], [], threading.Barrier(2, timeout=WAIT_S)

    def slow(body):
        under_way.append(letter(body))
        two.wait()
        time.sleep(0.05)  # by the clock: a third one would come meanwhile; a slow machine can only miss it
        most.append(len(under_way))
        two.wait()
        under_way.remove(letter(body))
        return good(body)

    with backend(serve(slow), in_flight=2) as client:
        assert len(client.generate(requests("abcdef"), seed_plan=PLAN)) == 6
    assert max(most) == 2


def test_server_is_polled_for_health_several_times_within_timeout(caplog):
    polls, timeout_s = threading.Semaphore(0), 10

    def answer(path, body):
        if path == "/weight_info":
            polls.release()
            return 200, {"weight_version": "3"}
        seen = [polls.acquire(timeout=2 * timeout_s) for _ in range(3)]  # one before the request, two beside it
        return good(body) if all(seen) else refuse(body)

    with answering(answer) as server, backend(server, timeout_s=timeout_s) as client:
        assert len(client.generate(requests("a"), seed_plan=PLAN, version=3)) == 1
    assert not caplog.records, "it takes long only after the timeout"


def test_backend_answers_again_after_failed_call(serve):
    answers = iter([refuse, good])
    with backend(serve(lambda body: next(answers)(body))) as client:
        with pytest.raises(ServerError, match="503"):
            client.generate(requests("a"), seed_plan=PLAN)
        assert len(client.generate(requests("a"), seed_plan=PLAN)) == 1


def test_proxy_environment_is_ignored_for_loopback(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with backend(serve()) as client:
        assert len(client.generate(requests("a"), seed_plan=PLAN)) == 1


class Counting(AnsweringHandler):
    def setup(self):
        super().setup()
        self.server.opened.release()

    def finish(self):
        super().finish()
        self.server.closed.release()


def test_connections_are_kept_alive_until_backend_closes():
    with serving(Counting) as server:
        server.answer = lambda path, body: good(body) if body else (200, {"weight_version": "0"})
        server.opened, server.closed = threading.Semaphore(0), threading.Semaphore(0)
        with backend(server) as client:
            client.generate(requests("a"), seed_plan=PLAN, version=0)
            assert server.opened.acquire(timeout=WAIT_S)
            assert not server.closed.acquire(blocking=False)
        assert server.closed.acquire(timeout=WAIT_S)


def test_connections_to_failed_server_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(http, "KEEPALIVE_S", 3600)
    with serving(Counting) as server:
        server.answer = lambda path, body: refuse(body) if body else (200, {"weight_version": "0"})
        server.opened, server.closed = threading.Semaphore(0), threading.Semaphore(0)
        with backend(server) as client:
            with pytest.raises(ServerError, match="503"):
                client.generate(requests("a"), seed_plan=PLAN)
            assert server.closed.acquire(timeout=WAIT_S)
