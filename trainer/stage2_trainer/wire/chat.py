"""The chat route's request and answer, and the strict reading of the latter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stage2_api.errors import refused
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import (
    POLICY_MODEL,
    FinishReason,
    Rollout,
    RolloutRequest,
    Sampling,
)

INFER_ROUTE = "/infer/"
IMAGE_TAG = "<image>"


def infer_request(request: RolloutRequest) -> dict[str, Any]:
    """Return the request as ms-swift's RolloutInferRequest takes it: text with image tags, and the images beside it.

    Raises ConfigError for a bias, which these servers do not know.
    """
    if request.bias:
        rule = "servers of `swift rollout` take no bias"
        raise refused("vllm.server.protocol", "swift", rule, "use servers of `stage2 serve`, or rollout_backend: hf")
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


CHAT_ROUTE = "/v1/chat/completions"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class Message(_Strict):
    """The generated text."""

    content: str


class Choice(_Strict):
    """The generated ids. An aborted answer has another finish_reason, and is refused."""

    message: Message
    token_ids: list[int]
    finish_reason: FinishReason


class Drafts(_Strict):
    """vLLM's counts of the tokens drafted for an answer."""

    num_draft_tokens: Annotated[int, Field(ge=0)]
    num_accepted_draft_tokens: Annotated[int, Field(ge=0)]
    acceptance_histogram: list[Annotated[int, Field(ge=0)]] = []


class Metrics(_Strict):
    """What vLLM measured; drafts are None where it makes none."""

    speculative_decoding: Drafts | None = None


class Answer(_Strict):
    """The fields that a server's answer must have, at least, and those that we read if it has them."""

    object: Literal["chat.completion"]
    prompt_token_ids: Annotated[list[int], Field(min_length=1)]
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]
    metrics: Metrics | None = None

    def rollout(self, **origin: Any) -> Rollout:
        """Return the rollout of the answer. origin: the other fields of `Rollout`."""
        (choice,) = self.choices
        drafts = self.metrics and self.metrics.speculative_decoding
        return Rollout(
            prompt_token_ids=self.prompt_token_ids,
            token_ids=choice.token_ids,
            text=choice.message.content,
            finish_reason=choice.finish_reason,
            drafted=drafts.num_draft_tokens if drafts else 0,
            accepted=drafts.num_accepted_draft_tokens if drafts else 0,
            verified=tuple(drafts.acceptance_histogram) if drafts else (),
            **origin,
        )


def chat_body(request: RolloutRequest, sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return the JSON object of one request."""
    repetition = sampling.repetition
    return {
        "model": request.adapter or POLICY_MODEL,
        "messages": list(request.messages),
        "seed": seed,
        "return_token_ids": True,
        **sampling.parameters(),
        **({} if repetition is None else {"repetition_detection": asdict(repetition)}),
        **bias_fields(request.bias),
    }


def bias_fields(bias: Mapping[int, float]) -> dict[str, Any]:
    """Return the field of a chat request that has a bias, by OpenAI's name; none without one."""
    return {"logit_bias": {str(token): value for token, value in bias.items()}} if bias else {}


def read_answer(body: bytes) -> Answer:
    """Read a server's answer.

    Raises:
        ValueError: it is not JSON, not an answer, or lacks ids; the message names the field.
    """
    try:
        return Answer.model_validate_json(body)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'answer'}: {e['msg']}" for e in error.errors())
        raise ValueError(faults) from error
