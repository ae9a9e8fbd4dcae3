"""Chat messages: a record's images and prompt as the user turn that goes to a rollout server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from stage2_trainer.data.images import ImageError, image_url, load_image, source_fault
from stage2_trainer.data.records import Record
from stage2_trainer.data.run_records import size_fault


@dataclass(frozen=True)
class Prompts:
    """The configured prompts: the text of the user turn, and of the system turn if any."""

    user: str
    system: str | None = None

    def chat(self, record: Record) -> list[dict[str, Any]]:
        """Return the messages of a record, without any answer."""
        return chat_messages(record, self.user, system=self.system)


def chat_messages(record: Record, prompt: str, *, system: str | None = None) -> list[dict[str, Any]]:
    """Return OpenAI chat messages: an optional system turn, then one user turn of image parts and a text part.

    The ground truth is never part of them: the model's answer is its own. Raises ImageError if an image cannot be used,
    or has another size than its record states.
    """
    if fault := size_fault(record):
        raise fault
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image_url(source)}} for source in record.images
    ]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}
    return [{"role": "system", "content": system}, user] if system else [user]


def image_sources(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the URLs of all image parts, in the order of their tokens in the prompt."""
    return [
        part["image_url"]["url"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def load_images(messages: Sequence[Mapping[str, Any]]) -> list[Image.Image]:
    """Return the images of all image parts, in the same order. Raises ImageError for one that cannot be read."""
    return [load_image(source) for source in image_sources(messages)]


def record_fault(record: Record) -> ImageError | None:
    """Return why a record's images cannot be trained on; None if they can."""
    return source_fault(record.images) or size_fault(record)
