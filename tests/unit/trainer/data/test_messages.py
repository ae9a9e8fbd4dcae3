"""A request holds images and prompt in order, and never the answer."""

from __future__ import annotations

import json

from stage2_trainer.data.messages import chat_messages, image_sources
from stage2_trainer.data.records import Record
from stage2_trainer.matching import GTObject

RECORD = Record(
    index=0,
    sample_id="s",
    images=("data:image/png;base64,AA==", "data:image/png;base64,AQ=="),
    width=10,
    height=10,
    objects=(GTObject("secret", "bbox", (1, 2, 3, 4)),),
)


def test_the_user_turn_has_the_images_and_then_the_prompt():
    (user,) = chat_messages(RECORD, "List.")
    assert [part["type"] for part in user["content"]] == ["image_url", "image_url", "text"]
    assert user["content"][-1]["text"] == "List."


def test_a_system_prompt_comes_first():
    assert [turn["role"] for turn in chat_messages(RECORD, "List.", system="Be exact.")] == ["system", "user"]


def test_the_ground_truth_is_not_in_the_request():
    assert "secret" not in json.dumps(chat_messages(RECORD, "List."))


def test_image_sources_are_in_token_order():
    assert image_sources(chat_messages(RECORD, "List.", system="Be exact.")) == list(RECORD.images)
