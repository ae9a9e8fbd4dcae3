"""Chat messages: a record's images and prompt as the user turn that a rollout server is sent."""

from __future__ import annotations

from typing import Any

from stage2_trainer.data.images import image_url
from stage2_trainer.data.records import Record


def chat_messages(record: Record, prompt: str, *, system: str | None = None) -> list[dict[str, Any]]:
    """Return OpenAI chat messages: an optional system turn, then one user turn of image parts and a text part.

    The ground truth is never part of them: what is generated from these messages is the model's own answer.
    """
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image_url(source)}} for source in record.images
    ]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}
    return [{"role": "system", "content": system}, user] if system else [user]


def image_sources(messages: list[dict[str, Any]]) -> list[str]:
    """Return the URLs of all image parts, in the order in which their tokens stand in the prompt."""
    return [
        part["image_url"]["url"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
