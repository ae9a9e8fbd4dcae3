"""The chat route's request and answer, and the strict reading of the latter."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stage2_trainer.wire.rollout import FinishReason, RolloutRequest, Sampling
from stage2_trainer.wire.served_model import POLICY_MODEL

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


class Answer(_Strict):
    """The fields that a server's answer must have, at least."""

    object: Literal["chat.completion"]
    prompt_token_ids: Annotated[list[int], Field(min_length=1)]
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]


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
    }


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
