"""The requests that the stub reads: chats in OpenAI's format with their images, and the calls of an update."""

from __future__ import annotations

from typing import Any

from PIL import Image
from pydantic import BaseModel, Field

from stage2_trainer.data.images import load_image
from stage2_trainer.wire.repetition import RepetitionDetection


class ChatRequest(BaseModel):
    """The fields of a chat request that the stub honours; others are ignored."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    seed: int | None = None
    n: int = Field(default=1, ge=1)
    repetition_detection: RepetitionDetection | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    return_token_ids: bool = False


class InitRequest(BaseModel):
    """Body of POST /init_weight_transfer_engine."""

    init_info: dict[str, Any]


class AdapterInfo(BaseModel):
    """The adapter that tensors belong to. config: as in PEFT's adapter_config.json."""

    name: str
    config: dict[str, Any]


class UpdateInfo(BaseModel):
    """The tensors that follow, in order: base weights, those of an adapter, or what a recipe needs (`merge`).

    group: the name of the group that they are sent in.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group: str
    adapter: AdapterInfo | None = None
    merge: dict[str, Any] | None = None


class UpdateRequest(BaseModel):
    """Body of POST /update_weights."""

    update_info: UpdateInfo


class FolderRequest(BaseModel):
    """Body of POST /stage2/folder-digests: names of tensors, and dtypes to cast them to."""

    tensors: list[tuple[str, str]]


class UnloadRequest(BaseModel):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str


class FinishRequest(BaseModel):
    """Body of POST /finish_weight_update."""

    weight_version: str | None = None


def split_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Replace image parts by the chat template's `{"type": "image"}`, and return the images in order.

    Raises:
        ValueError: an image is no `data:` URL, or cannot be read.
    """
    images: list[Image.Image] = []
    plain = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [_part(part, images) for part in content]
        plain.append({**message, "content": content})
    return plain, images


def _part(part: dict[str, Any], images: list[Image.Image]) -> dict[str, Any]:
    if part["type"] != "image_url":
        return part
    url = part["image_url"]["url"]
    if not url.startswith("data:"):
        raise ValueError(f"an image must be a data: URL, found {url[:80]!r}")
    images.append(load_image(url))
    return {"type": "image"}
