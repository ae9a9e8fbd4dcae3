"""What every rollout server keeps, real vLLM and the stub alike: the guard, the chat route, the push, and its proof."""

import copy
import json
import re
import socket
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import aiohttp
import httpx
import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from stage2_api.rollout_matching import RepeatTerminate
from stage2_api.vllm import VllmSync
from stage2_trainer.data.encode import Encoder
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.serve.bounded_http import MOST_STRANGERS
from stage2_trainer.sync.fleet import delivery
from stage2_trainer.sync.fleet.proof import BF16_TOLERANCE, FLOAT32_TOLERANCE, Probe, server_logprobs, text_tokens
from stage2_trainer.sync.fleet.report import ProofError
from stage2_trainer.sync.tensors.merge import WeightAccess, merged_weights
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body
from stage2_trainer.wire.client import ServerClient, wait_until_healthy
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import (
    Refused,
    RepetitionDetection,
    RolloutRequest,
    Sampling,
    SeedPlan,
)
from tests.integration import app_routes, policies, sent_faults
from tests.integration.app_routes import WEBSOCKET, Route

PROMPT = "List the shapes."
NEW_TOKENS = 48
SMALL_BUCKETS = 400_000  # bytes: several buckets even for the tiny model
BLOCKS_OF_TEXT = 80  # repetitions: several blocks of a prefix cache, which keeps whole ones
AT_LEARNER = VllmSync(merge="learner")  # the other place: test_merge_at_server.py
AT_SERVER = VllmSync(merge="server")
MOVED = 0.05  # how much a log-probability moves at least between policies that differ


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def encoder(model_path):
    return Encoder(AutoProcessor.from_pretrained(model_path))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Prompts with images of different content and size."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(5)
    made = []
    for i, (width, height) in enumerate([(96, 96), (64, 96), (96, 48), (80, 80), (48, 48)]):
        pixels = np.full((height, width, 3), random.integers(180, 255, 3), dtype=np.uint8)
        pixels[height // 4 : height // 2, width // 4 : width // 2 + 8 * i % width] = random.integers(0, 255, 3)
        made.append(policies.image_chat(folder / f"{i}.png", pixels))
    return made


@pytest.fixture(scope="module")
def probe(encoder, chats):
    return Probe(messages=chats[0], inputs=model_inputs(encoder, chats[0]))


@pytest.fixture
def sync(served, make_sync):
    return make_sync(served, access=WeightAccess(SMALL_BUCKETS), how=AT_LEARNER)


@pytest.fixture
def backend(served, token):
    with make_backend([served.base_url], token) as backend:
        yield backend


def make_backend(urls, token, **sampling):
    options = {"max_new_tokens": NEW_TOKENS, **sampling}
    return ServerBackend(urls, token=token, sampling=Sampling(**options), timeout_s=30, infer_timeout_s=120)


def model_inputs(encoder, chat):
    prompt = encoder.prompt(chat)
    return {
        "input_ids": prompt.input_ids.unsqueeze(0),
        "mm_token_type_ids": prompt.mm_token_type_ids.unsqueeze(0),
        "pixel_values": prompt.pixel_values,
        "image_grid_thw": prompt.image_grid_thw,
    }


def requests(chats):
    return [RolloutRequest(messages=chat) for chat in chats]


MANY_BYTES = 48 * 2**20  # more than both ends' kernels hold for a connection
LEAST_ROUTES = {"vllm": 60, "stub": 15}
HANDSHAKE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip


def test_every_route_but_health_needs_token(engine, served, token, model_path):
    routes = app_routes.read_routes(engine, model_path)
    assert len(routes) >= LEAST_ROUTES[engine]
    with httpx.Client(base_url=served.base_url, trust_env=False, timeout=30) as http:
        schema = http.get("/openapi.json", headers={"Authorization": f"Bearer {token}"}).json()
        of_schema = {
            Route(method.upper(), re.sub(r"{[^}]*}", "1", path))
            for path, methods in schema["paths"].items()
            for method in methods
        }
        assert Route("POST", "/update_weights") in of_schema
        assert of_schema <= routes, "the app that was walked is the server's"
        routes.add(Route("GET", "/stage2/identity"))  # a middleware's, which the app does not know
        answers = {}
        for route in sorted(routes):
            if route.method == WEBSOCKET:
                answers[route] = http.get(route.path, headers=HANDSHAKE).status_code
            elif route.path != "/health":
                answers[route] = http.request(*route).status_code
        closed = {route: 403 if route.method == WEBSOCKET else 401 for route in answers}
        assert {route: status for route, status in answers.items() if status != closed[route]} == {}
        assert http.get("/health").status_code == 200


def test_unauthenticated_connections_are_limited(served):
    address = urlsplit(served.base_url)
    with ExitStack() as stack:

        def connect():
            return stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=120))

        endless, sent = connect(), 0
        endless.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        with suppress(OSError):
            while sent < MANY_BYTES:
                endless.sendall(b"x: y\r\n" * 10_000)
                sent += 60_000
        assert sent < MANY_BYTES
        silent = [connect() for _ in range(MOST_STRANGERS + 16)]
        for connection in silent[:16]:
            with suppress(ConnectionError):
                assert connection.recv(1) == b""
        assert httpx.get(f"{served.base_url}/health", trust_env=False, timeout=30).status_code == 200


def test_learner_with_wrong_token_is_refused(served):
    with pytest.raises(ServerError, match="401"):
        wait_until_healthy([served.base_url], "another", timeout_s=20)


def test_wait_ends_when_server_is_healthy(served, token):
    wait_until_healthy([served.base_url], token, timeout_s=20)


def test_server_tokenizes_prompt_like_learner(backend, encoder, chats):
    rollouts = backend.generate(requests(chats), seed_plan=SeedPlan(1, 0, 0))
    for rollout, chat in zip(rollouts, chats, strict=True):
        assert rollout.prompt_token_ids == encoder.prompt(chat).input_ids.tolist()


def test_answers_keep_request_order(served, token, sync, base, backend, chats):
    sync.push(base, version=0)
    alone = [backend.generate([request], seed_plan=SeedPlan(1, 0, 0))[0] for request in requests(chats)]
    names = [served.base_url.replace("127.0.0.1", host) for host in ("127.0.0.1", "127.1", "localhost")]
    with make_backend(names, token) as several:
        together = several.generate(requests(chats), seed_plan=SeedPlan(1, 0, 0), version=0)
    assert [rollout.token_ids for rollout in together] == [rollout.token_ids for rollout in alone]
    assert {rollout.version for rollout in together} == {0}
    assert all(0 <= one.accepted <= one.drafted and one.accepted < len(one.token_ids) for one in together)


def test_empty_request_list_calls_no_server(token):
    with make_backend(["http://127.0.0.1:9"], token) as nowhere:
        assert nowhere.generate([], seed_plan=SeedPlan(1, 0, 0)) == []


def test_sampled_answers_follow_seeds(served, token, chats):
    with make_backend([served.base_url], token, temperature=1.5) as sampling:
        draws = [
            [rollout.token_ids for rollout in sampling.generate(requests(chats), seed_plan=SeedPlan(1, step, 0))]
            for step in (4, 4, 5)
        ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_repetition_loop_ends_answer_at_first_repeat(served, token, sync, base, backend, chats):
    """A server ends an answer at the first token at which a sequence stands as often in a row as it may."""
    sync.push(policies.looping(base), version=0)
    whole = [rollout.token_ids for rollout in backend.generate(requests(chats), seed_plan=SeedPlan(1, 0, 0))]
    loops = RepetitionDetection.from_rules(RepeatTerminate(enabled=True, ngram_size=3, ngram_repeats=2))
    cuts = [[n for n in range(1, len(ids)) if loops.ends_in_loop(ids[:n])][:1] for ids in whole]
    assert any(cuts), "no answer holds a loop: the test shows nothing"
    with make_backend([served.base_url], token, repetition=loops) as ending:
        ended = ending.generate(requests(chats), seed_plan=SeedPlan(1, 0, 0))
    sync.push(base, version=1)
    for rollout, ids, cut in zip(ended, whole, cuts, strict=True):
        assert rollout.token_ids == ids[: cut[0] if cut else None]
        assert (rollout.finish_reason == "repetition") is bool(cut)


def test_server_refuses_request_longer_than_context_and_error_names_its_index(served, token, chats):
    with make_backend([served.base_url], token, max_new_tokens=4000) as too_long:
        (found,) = too_long.generate(requests(chats[:1]), seed_plan=SeedPlan(1, 0, 0))
    assert isinstance(found, Refused)
    assert str(found.error).startswith(f"server {served.base_url}, phase rollout: request 0 answered 400")


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("kind", policies.KINDS)
def test_server_answers_like_learner_after_push(kind, sync, client, backend, base, probe, chats):
    sync.push(base, version=1)
    before = server_logprobs(client, probe)
    policy = policies.trained(base, kind)
    report = sync.push(policy, version=2)
    (gap,) = policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE).values()
    assert gap.tokens == int(text_tokens(probe.inputs["mm_token_type_ids"]).sum()) > 0
    assert (server_logprobs(client, probe) - before).abs().max() > MOVED
    (rollout,) = backend.generate(requests(chats[:1]), seed_plan=SeedPlan(1, 2, 0), version=2)
    assert rollout.token_ids == policies.greedy(policy, probe.inputs, NEW_TOKENS)
    metas = merged_weights(base).metadata()
    assert (report.version, report.tensors, report.bytes) == (2, len(metas), sum(m.nbytes for m in metas))
    assert report.everything


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("kind", ["lora", "dora", "vision", "one-projection"])
def test_changed_only_push_makes_server_answer_like_learner(kind, sync, client, base, probe):
    policy = policies.partly_trained(base, kind)
    first = sync.push(policy, version=1)
    before = server_logprobs(client, probe)
    for version in (2, 3):
        policies.train_on(policy)
        later = sync.push(policy, version=version)
    assert (server_logprobs(client, probe) - before).abs().max() > MOVED
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)
    assert first.everything
    assert not later.everything
    assert later.bytes < first.bytes * 0.6


def test_push_over_existing_group_calls_only_routes_of_update(sync, base, monkeypatch):
    policy, asked, request = policies.partly_trained(base, "vision"), [], aiohttp.ClientSession.request
    sync.push(policy, version=1)

    def counted(session, method, url, **options):
        asked.append(urlsplit(url).path)
        return request(session, method, url, **options)

    monkeypatch.setattr(aiohttp.ClientSession, "request", counted)
    sync.push(policy, version=2)
    begin = ["/weight_info", "/pause", "/start_weight_update"]
    resets = ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"]
    finish = ["/update_weights", "/finish_weight_update", *resets, "/resume", "/weight_info"]
    assert asked == [*begin, "/update_weights", *finish]


def test_restarted_learner_sends_all_weights(served, make_sync, sync, client, base, probe):
    policy = policies.partly_trained(base, "lora")
    sync.push(policy, version=1)
    assert not sync.push(policy, version=2).everything
    sync.close()
    again = make_sync(served, how=AT_LEARNER)
    assert again.push(policy, version=3).everything
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)


def test_server_with_unexpected_version_is_sent_all_weights(sync, client, base, probe):
    policy = policies.partly_trained(base, "lora")
    sync.push(policy, version=1)
    client.post("/update_weight_version", "test", body={"new_version": "77"})
    assert sync.push(policy, version=2).everything
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)


def test_pushing_first_weights_back_restores_exact_log_probabilities(sync, client, base, probe):
    sync.push(base, version=1)
    before = server_logprobs(client, probe)
    sync.push(policies.trained(base, "full"), version=2)
    sync.push(base, version=3)
    assert torch.equal(server_logprobs(client, probe), before)


def test_changed_vision_tower_changes_answers_about_known_image(sync, client, base, probe):
    sync.push(base, version=1)
    before = server_logprobs(client, probe)
    moved = policies.with_other_vision(base)
    sync.push(moved, version=2)
    policies.verify(moved, probe, [client], tolerance=FLOAT32_TOLERANCE)
    assert (server_logprobs(client, probe) - before).abs().max() > MOVED


def test_without_cache_reset_known_image_keeps_old_vision_features(engine, sync, base, client, probe, monkeypatch):
    if engine == "stub":
        pytest.skip("the stub caches nothing")
    sync.push(base, version=1)
    server_logprobs(client, probe)
    monkeypatch.setattr("stage2_trainer.sync.fleet.server.RESET_AFTER_VISION", ())
    moved = policies.with_other_vision(base)
    sync.push(moved, version=2)
    with pytest.raises(ProofError):
        policies.verify(moved, probe, [client], tolerance=FLOAT32_TOLERANCE)
    monkeypatch.undo()
    sync.push(base, version=3)
    policies.verify(base, probe, [client], tolerance=FLOAT32_TOLERANCE)


def test_prefix_cache_of_older_weights_is_not_used_after_push(engine, sync, base, encoder, client, monkeypatch):
    if engine == "stub":
        pytest.skip("the stub caches nothing")
    chat = [{"role": "user", "content": PROMPT * BLOCKS_OF_TEXT}]
    policy = policies.trained(base, "full")

    def gap(model):
        body = chat_body(RolloutRequest(messages=chat), Sampling(max_new_tokens=1), seed=0)
        found = client.post(CHAT_ROUTE, "test", body={**body, "logprobs": True})["choices"][0]
        token, said = found["token_ids"][0], found["logprobs"]["content"][0]["logprob"]
        with torch.no_grad():
            own = model(input_ids=encoder.prompt(chat).input_ids[None], use_cache=False).logits[0, -1].log_softmax(-1)
        return abs(float(own[token]) - said)

    sync.push(base, version=1)
    assert gap(base) < FLOAT32_TOLERANCE
    monkeypatch.setattr("stage2_trainer.sync.fleet.server.ServerSession._reset_prefix_cache", lambda _: None)
    sync.push(policy, version=2)
    assert gap(policy) > MOVED, "without the reset it does"
    monkeypatch.undo()
    sync.push(policy, version=3)
    assert gap(policy) < FLOAT32_TOLERANCE


def test_server_with_different_weights_fails_proof(sync, client, base, probe):
    sync.push(base, version=1)
    with pytest.raises(ProofError, match="log-probabilities"):
        policies.verify(policies.trained(base, "lora"), probe, [client], tolerance=FLOAT32_TOLERANCE)


def test_rollouts_of_other_weight_version_are_refused(sync, backend, base, chats):
    sync.push(base, version=7)
    with pytest.raises(ServerError, match="weight version 7, not 8"):
        backend.generate(requests(chats), seed_plan=SeedPlan(1, 8, 0), version=8)


def test_update_left_open_by_dead_learner_does_not_block_next_push(sync, client, base, probe):
    client.post("/start_weight_update", "test")
    sync.push(base, version=1)
    policies.verify(base, probe, [client], tolerance=FLOAT32_TOLERANCE)


def test_late_call_from_other_group_is_refused_at_once(sync, client, base, probe):
    sync.push(base, version=1)
    client.post("/start_weight_update", "start")
    late = {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [[4]], "group": "of-a-dead-learner"}
    late["number"] = 1
    with pytest.raises(ServerError, match=r"of-a-dead-learner.*late one"):
        client.post("/update_weights", "push", body={"update_info": late})
    sync.push(base, version=2)
    policies.verify(base, probe, [client], tolerance=FLOAT32_TOLERANCE)


def test_repeated_call_is_refused_without_disturbing_next_push(sync, client, base, probe):
    sync.push(base, version=1)
    client.post("/start_weight_update", "start")
    again = {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [[4]], "number": 1}
    again["group"] = sync.fleet.sessions[0].transfer.group
    with pytest.raises(ServerError, match="has repeated the call"):
        client.post("/update_weights", "push", body={"update_info": again})
    sync.push(base, version=2)
    policies.verify(base, probe, [client], tolerance=FLOAT32_TOLERANCE)


def test_interrupted_push_is_repaired_by_next_push(sync, client, base, probe, monkeypatch):
    sync.push(base, version=1)
    policy = policies.trained(base, "full")
    source = merged_weights(policy)
    half = tuple(source.entries[: len(source.entries) // 2])
    monkeypatch.setattr(type(source), "__iter__", lambda self: iter([(e.name, e.parameter) for e in half]))
    with pytest.raises(ValueError, match="was announced"):
        sync.push(policy, version=2)
    monkeypatch.undo()
    assert client.weight_version() == "1"
    sync.push(policy, version=3)
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)


def test_digests_of_full_training_detect_wrong_weights(sync, base, client, probe, monkeypatch):
    policy = copy.deepcopy(base)
    sync.push(policy, version=1)
    policies.train_on(policy, 0.02)
    sync.push(policy, version=2)
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)
    with monkeypatch.context() as tampered:
        sent_faults.wrong(tampered, base, policy)
        with pytest.raises(ProofError, match=rf"{sent_faults.LAYER}\b.*digests"):
            sync.push(policy, version=3)
    assert client.weight_version() == "2"
    sync.push(policy, version=4)
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)


def test_merge_interrupted_within_layer_is_repaired_by_next_push(served, make_sync, client, base, probe, monkeypatch):
    """Of the layer that holds three projections in one tensor two have come by then."""
    sync, policy = make_sync(served, how=AT_SERVER), policies.trained(base, "dora")
    honest = delivery.recipe

    def recipe(*what):
        header = json.loads(json.dumps(honest(*what)))
        (last,) = [made for made in header["merge"]["tensors"] if "layers.1.self_attn.v_proj." in made["name"]]
        last["name"] = "of no layer"
        return header

    monkeypatch.setattr(delivery, "recipe", recipe)
    with pytest.raises(ServerError, match="of no layer"):
        sync.push(policy, version=2)
    monkeypatch.undo()
    assert sync.push(policy, version=3).merge == "server"
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("kind", policies.KINDS)
def test_in_bfloat16_server_and_learner_agree_to_rounding(kind, engine, servers, token, make_sync, model_path, probe):
    served = servers(engine, "bfloat16")
    client = ServerClient(served.base_url, token, timeout_s=60)
    sync = make_sync(served, how=AT_LEARNER)
    first = policies.load(model_path, torch.bfloat16)
    policy = policies.trained(first, kind)
    sync.push(policy, version=1)
    policies.verify(policy, probe, [client], tolerance=BF16_TOLERANCE)
    with pytest.raises(ProofError, match="log-probabilities"):
        policies.verify(first, probe, [client], tolerance=BF16_TOLERANCE)
