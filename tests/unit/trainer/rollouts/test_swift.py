"""Requests for `swift rollout`: JSON, with an image tag in the text for each image beside it."""

import json

from stage2_trainer.serve.stub.swift_routes import SwiftRequest
from stage2_trainer.wire.chat import infer_request, request_config
from stage2_trainer.wire.requests import RolloutRequest, Sampling


def image(name):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


CHAT = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [image("AA"), {"type": "text", "text": "and"}, image("BB"), {"type": "text", "text": "?"}],
    },
]


def test_images_leave_a_tag_in_the_text_and_travel_beside_it():
    made = infer_request(RolloutRequest(CHAT))
    assert made["messages"][1]["content"] == "<image>and<image>?"
    assert made["images"] == ["data:image/png;base64,AA", "data:image/png;base64,BB"]
    assert json.loads(json.dumps(made)) == made


def test_the_stub_reads_back_what_was_asked():
    made = infer_request(RolloutRequest(CHAT))
    system, user = SwiftRequest(**made).openai_messages()
    assert user == CHAT[1]
    assert system["content"] == [{"type": "text", "text": "Be brief."}]


def test_token_ids_are_asked_for_and_the_seed_is_sent():
    config = request_config(Sampling(max_new_tokens=7, repetition_penalty=1.05), seed=9)
    assert (config["return_details"], config["seed"], config["max_tokens"]) == (True, 9, 7)
    assert (config["temperature"], config["repetition_penalty"], config["n"]) == (0.0, 1.05, 1)
