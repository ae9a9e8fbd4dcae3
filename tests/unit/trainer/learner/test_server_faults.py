"""The servers' part of the table of faults: a refusal of one request costs its sample, all else is the server's."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager

import pytest

from stage2_api.errors import EXIT_RETRYABLE
from stage2_trainer import main
from stage2_trainer.rollouts.errors import BadStepError
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.swift import SwiftBackend
from stage2_trainer.sync.transports.transfer import WeightTransfer
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Refused, RolloutRequest, Sampling, SeedPlan
from tests.support.http_server import answering
from tests.unit.trainer.learner.configs import run_config, write_box_records
from tests.unit.trainer.learner.harness import ScriptedBackend, box, perfect, record


def backend_of(url):
    return ServerBackend([url], token="t", sampling=Sampling(8), timeout_s=30)


@contextmanager
def served(answer):
    """A backend over one server that answers so, and the server's URL."""
    with answering(answer) as http, backend_of(http.url) as backend:
        yield backend, http.url


def without_chat(status, document):
    """Answer every chat request so."""
    return lambda path, body: (200, {"weight_version": "0"}) if path == "/weight_info" else (status, document)


class Refuses:
    """A server that answers truly, and with `status` where a record is at fault."""

    def __init__(self, backend: ScriptedBackend, at_fault: int | None, status: int):
        self.backend, self.at_fault, self.status, self.asked = backend, at_fault, status, 0

    def __call__(self, path, body):
        if path == "/weight_info":
            return 200, {"weight_version": "0"}
        self.asked += 1
        request = RolloutRequest(body["messages"])
        answer = self.backend._rollout(request, 0)
        place = [answer.text == perfect(one) for one in self.backend.records].index(True)
        if place == self.at_fault:
            return self.status, {"error": {"message": "The prompt is longer than the maximum model length"}}
        choice = {"message": {"content": answer.text}, "token_ids": answer.token_ids, "finish_reason": "stop"}
        return 200, {"object": "chat.completion", "prompt_token_ids": answer.prompt_token_ids, "choices": [choice]}


@pytest.fixture
def distinct(image_paths):
    return [record(path, i, object_1=box("red box", 100, 100, 400, 400 + i)) for i, path in enumerate(image_paths)]


@pytest.fixture
def trained_by_server(trained, encoder, distinct):
    def run(at_fault, status, **options):
        server = Refuses(ScriptedBackend(encoder, distinct, perfect), at_fault, status)
        with served(server) as (backend, _):
            return *trained(records=distinct, backend=backend, **options), server

    return run


@pytest.mark.parametrize("status", [400, 413, 422])
def test_request_refused_by_server_sets_sample_aside_without_retry(trained_by_server, status):
    lines, seen, _, server = trained_by_server(1, status)
    (logged,) = [one for one in lines if one["event"] == "bad_sample"]
    assert logged["sample_id"] == "record-1"
    assert f"answered {status}: " in logged["reason"]
    assert "longer than the maximum model length" in logged["reason"]
    assert [one.record.index for one in seen] == [0, 2]
    assert server.asked == 3


def swift_outcomes(status, temperature):
    """What comes of three requests to a server of `swift rollout` that refuses every call with the second in it."""
    calls = []

    def say(path, body):
        texts = [one["messages"][0]["content"] for one in body["infer_requests"]]
        calls.append(texts)
        if "b" in texts:
            return status, {"detail": "The prompt is longer than the maximum model length"}
        choice = {"message": {"content": "x"}, "token_ids": [1], "finish_reason": "stop"}
        answer = {"object": "chat.completion", "prompt_token_ids": [7], "choices": [choice]}
        return 200, [{"response": answer} for _ in texts]

    with answering(say) as http:
        client = ServerClient(http.url, "t", timeout_s=30)
        backend = SwiftBackend([client], sampling=Sampling(8, temperature=temperature))
        asked = [RolloutRequest([{"role": "user", "content": text}]) for text in "abc"]
        return backend.generate(asked, seed_plan=SeedPlan(17, 0, 0), version=0), calls


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize(("temperature", "calls"), [(0.0, ["abc", "a", "bc", "b", "c"]), (1.0, ["a", "b", "c"])])
def test_request_refused_by_swift_sets_sample_aside(status, temperature, calls):
    outcomes, asked = swift_outcomes(status, temperature)
    assert ["".join(call) for call in asked] == calls
    assert [isinstance(one, Refused) for one in outcomes] == [False, True, False]
    assert f"answered {status}: " in str(outcomes[1].error)


def test_other_error_status_of_swift_is_server_error():
    with pytest.raises(ServerError, match="answered 500"):
        swift_outcomes(500, 0.0)


@pytest.mark.parametrize("status", [401, 404, 500, 503])
def test_other_error_status_is_server_error(trained_by_server, status):
    with pytest.raises(ServerError, match=f"answered {status}"):
        trained_by_server(1, status)


def test_refused_request_stops_run_that_allows_no_bad_sample(trained_by_server):
    with pytest.raises(ServerError, match=r"answered 400: .*longer than the maximum"):
        trained_by_server(1, 400, most_bad=0)


def test_server_that_refuses_every_request_stops_run(trained_by_server, distinct, encoder, trained):
    refuse = without_chat(400, {"error": {"message": "no"}})
    with served(refuse) as (backend, _), pytest.raises(BadStepError, match="answered 400"):
        trained(records=distinct, backend=backend)


HTML = b"<html><title>502 Bad Gateway</title></html>"


def html(path, body):
    return 200, HTML


def without_version(path, body):
    return 200, {"version": 3}


@pytest.mark.parametrize(("say", "reason"), [(html, "502 Bad Gateway"), (without_version, "weight_version")])
def test_proxy_answering_for_server_at_start_is_reported(
    say, reason, token, termination_log, tmp_path, model_path, image_paths
):

    def health_alone(path, body):
        return (200, b"") if path == "/health" else say(path, body)

    with answering(health_alone) as http:
        server = {"servers": [{"base_url": http.url, "group_port": 2}], "timeout_s": 60.0}
        config = run_config(
            matching={"vllm": {"mode": "server", "server": server}},
            training={"output_dir": str(tmp_path / "out"), "gradient_checkpointing": False},
            train_jsonl=write_box_records(tmp_path / "train.jsonl", image_paths[0]),
            model={"model": str(model_path)},
        )
        assert main.learn(config) == EXIT_RETRYABLE
    last_words = json.loads(termination_log.read_text())["message"]
    assert last_words.startswith(f"server {http.url}, phase version: GET /weight_info answered ")
    assert reason in last_words


@pytest.mark.parametrize(("say", "reason"), [(html, "502 Bad Gateway"), (without_version, "weight_version")])
def test_proxy_answering_for_server_during_run_is_reported(trained, distinct, say, reason):
    with served(say) as (backend, url), pytest.raises(ServerError) as caught:
        trained(records=distinct, backend=backend)
    assert re.match(rf"server {url}, phase rollout: weight version: .*{reason}", str(caught.value))


NOWHERE = "http://server-0.nowhere.invalid:8000"


def test_unresolvable_server_name_is_server_error(trained, distinct, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with (
        backend_of(NOWHERE) as backend,
        pytest.raises(ServerError, match=rf"server {NOWHERE}, phase rollout: weight version: ClientConnectorDNSError"),
    ):
        trained(records=distinct, backend=backend)


def test_unresolvable_server_name_raises_server_error_when_group_connects():
    class Client:
        base_url = NOWHERE

        def world_size(self):
            return 1

    transfer = WeightTransfer(1, token="t", bucket_bytes=1, timeout_s=60.0)
    with pytest.raises(ServerError, match=rf"server {NOWHERE}, phase connect: no way to server-0"):
        transfer.connect(Client())
