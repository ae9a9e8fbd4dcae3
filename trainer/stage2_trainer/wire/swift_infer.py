"""The rollout route of a server that `swift rollout` started: POST /infer/, a list in, a list out (ms-swift)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.rollout import RolloutRequest, Sampling

INFER_ROUTE = "/infer/"
IMAGE_TAG = "<image>"


def infer_request(request: RolloutRequest) -> dict[str, Any]:
    """Return the request as ms-swift's RolloutInferRequest takes it: text with image tags, and the images beside it."""
    images: list[str] = []
    messages = [{**message, "content": _text(message["content"], images)} for message in request.messages]
    return {"messages": messages, "images": images}


def _text(content: Any, images: list[str]) -> str:
    if isinstance(content, str):
        return content
    pieces = []
    for part in content:
        if part["type"] == "image_url":
            images.append(part["image_url"]["url"])
            pieces.append(IMAGE_TAG)
        else:
            pieces.append(part["text"])
    return "".join(pieces)


def request_config(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return the fields of ms-swift's RequestConfig; `return_details` asks for token ids."""
    return {**sampling.parameters(), "seed": seed, "return_details": True}


def infer(
    client: ServerClient,
    requests: Sequence[RolloutRequest],
    config: Mapping[str, Any],
    *,
    phase: str,
    timeout_s: float | None,
) -> list[dict[str, Any]]:
    """Return one answer for each request, unwrapped.

    Raises:
        ServerError: the server answers with another number of items, or an item is no answer.
    """
    body = {"infer_requests": [infer_request(request) for request in requests], "request_config": dict(config)}
    found = client.post_for_list(INFER_ROUTE, phase, body=body, timeout_s=timeout_s)
    if len(found) != len(requests):
        raise ServerError(client.base_url, phase, f"{len(found)} answers to {len(requests)} requests")
    return [item.get("response", item) for item in found]
