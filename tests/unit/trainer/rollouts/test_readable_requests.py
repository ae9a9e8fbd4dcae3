"""Requests for many answers at once, of `swift rollout` and of a colocated engine.

An image that cannot be read costs its own answer, and moves no other.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stage2_trainer.data.images import ImageError, image_url
from stage2_trainer.model.offload import DeviceMover, StateOffloader
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.rollouts.in_process import STAND_IN, ColocateRollouts
from stage2_trainer.rollouts.rollout_source import GenerationRequest, LazySequence
from stage2_trainer.rollouts.swift import SwiftBackend
from stage2_trainer.serve.stub.swift_routes import SwiftRequest
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.chat import infer_request, request_config
from stage2_trainer.wire.requests import Refused, Rollout, RolloutRequest, Sampling, SeedPlan, answers

PLAN = SeedPlan(17, 0, 0)


def asking(source):
    part = {"type": "image_url", "image_url": {"url": image_url(source)}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is there?"}]}]


@pytest.fixture
def chats(image_paths, tmp_path):
    """Of four images the second is cut off and the third is gone."""
    (tmp_path / "cut.png").write_bytes(Path(image_paths[0]).read_bytes()[:200])
    sources = [image_paths[0], str(tmp_path / "cut.png"), str(tmp_path / "gone.png"), image_paths[1]]
    return LazySequence(4, lambda index: asking(sources[index]))


class Client:
    """A `swift rollout` server that remembers how much each call asked."""

    base_url = "http://swift"

    def __init__(self):
        self.calls = []

    def post_for_list(self, path, phase, *, body, timeout_s):
        self.calls.append((len(body["infer_requests"]), body["request_config"]["seed"]))
        choice = {"message": {"content": "x"}, "token_ids": [body["request_config"]["seed"]], "finish_reason": "stop"}
        answer = {"object": "chat.completion", "prompt_token_ids": [1], "choices": [choice]}
        return [answer for _ in body["infer_requests"]]


@pytest.mark.parametrize(
    ("temperature", "calls"), [(0.0, [(2, 17)]), (1.0, [(1, 17), (1, 20)])], ids=["greedy", "sampled"]
)
def test_unreadable_image_does_not_change_seeds_of_other_swift_requests(chats, temperature, calls):
    client, reported = Client(), []
    requests = LazySequence(4, lambda index: RolloutRequest(chats[index]))
    backend = SwiftBackend([client], sampling=Sampling(8, temperature=temperature))
    found = backend.generate(
        requests, seed_plan=PLAN, version=3, on_rollout=lambda index, outcome: reported.append((index, outcome))
    )
    assert [isinstance(one, Refused) for one in found] == [False, True, True, False]
    assert client.calls == calls
    assert reported == list(enumerate(found))


class Engine:
    """An engine that answers each request with its seed."""

    asked: list[RolloutRequest]
    version = -1

    def start(self):
        pass

    def sync(self, model, *, version, make_room):
        make_room()
        self.version = version
        return SyncReport.create(version, 0.0, ["engine"])

    def generate(self, requests, *, seed_plan):
        self.asked = list(requests)
        return [Rollout([1], [seed_plan.seed(i)], "", "engine", self.version, "stop") for i in range(len(requests))]


def test_unreadable_image_does_not_change_seeds_of_other_colocated_requests(chats):
    engine = Engine()
    offload = StateOffloader(DeviceMover(torch.device("cpu")), model=False, optimizer=False)
    source = ColocateRollouts(engine, offload, sync_mode="full", seed=17, reporter=Reporter(), interrupt=Interrupt())
    batch = source.generate(GenerationRequest(torch.nn.Linear(1, 1), chats, 0, 0, Stopwatch(), sizes=(2, 2)))
    assert [isinstance(one, Refused) for one in batch.rollouts] == [False, True, True, False]
    assert [one == STAND_IN for one in engine.asked] == [False, True, True, False]
    assert [one.token_ids for one in batch.rollouts if isinstance(one, Rollout)] == [
        [batch.plan.seed(0)],
        [batch.plan.seed(3)],
    ]
    assert batch.plan.seed(0) == PLAN.seed(0), "no other process asks"
    with pytest.raises(ImageError):
        answers(batch.rollouts)


def image(name):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


CHAT = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [image("AA"), {"type": "text", "text": "and"}, image("BB"), {"type": "text", "text": "?"}],
    },
]


def test_swift_request_replaces_images_by_tags_and_sends_them_beside_text():
    made = infer_request(RolloutRequest(CHAT))
    assert made["messages"][1]["content"] == "<image>and<image>?"
    assert made["images"] == ["data:image/png;base64,AA", "data:image/png;base64,BB"]
    assert json.loads(json.dumps(made)) == made


def test_stub_server_restores_original_messages_of_swift_request():
    made = infer_request(RolloutRequest(CHAT))
    system, user = SwiftRequest(**made).openai_messages()
    assert user == CHAT[1]
    assert system["content"] == [{"type": "text", "text": "Be brief."}]


def test_swift_request_config_asks_for_token_ids_and_sends_seed():
    config = request_config(Sampling(max_new_tokens=7, repetition_penalty=1.05), seed=9)
    assert (config["return_details"], config["seed"], config["max_tokens"]) == (True, 9, 7)
    assert (config["temperature"], config["repetition_penalty"], config["n"]) == (0.0, 1.05, 1)
