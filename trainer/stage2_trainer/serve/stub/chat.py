"""The stub's answers to chat requests, with the fields that vLLM adds to OpenAI's."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from torch import Tensor

from stage2_trainer.serve.stub.model import ChatRequest, StubModel
from stage2_trainer.wire.requests import POLICY_MODEL


class ChatServer:
    """The chat route over a model; requests wait while `running` is not set. max_model_len: prompt and answer."""

    def __init__(self, model: StubModel, *, max_model_len: int) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.running = asyncio.Event()
        self.running.set()

    async def chat(self, request: ChatRequest) -> JSONResponse:
        """Answer one chat request."""
        if not self.model.serves(request.model):
            return error_response(404, f"The model `{request.model}` does not exist.")
        try:
            inputs = await run_in_threadpool(self.model.encode, request.messages)
        except (ValueError, KeyError) as error:
            return error_response(400, f"{type(error).__name__}: {error}")
        prompt_ids: list[int] = inputs["input_ids"][0].tolist()
        if len(prompt_ids) + request.max_tokens > self.max_model_len:
            return error_response(
                400, f"prompt ({len(prompt_ids)}) + max_tokens ({request.max_tokens}) > {self.max_model_len}"
            )
        await self.running.wait()
        answer = await run_in_threadpool(self.model.generate, inputs, request)
        completion = len(answer.token_ids)
        content: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model or POLICY_MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": answer.text},
                    "finish_reason": answer.finish_reason,
                    "token_ids": answer.token_ids if request.return_token_ids else None,
                    "logprobs": None,
                }
            ],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": completion,
                "total_tokens": len(prompt_ids) + completion,
            },
            "prompt_token_ids": prompt_ids if request.return_token_ids else None,
        }
        if request.prompt_logprobs is not None:
            content["prompt_logprobs"] = await run_in_threadpool(self._prompt_scores, request, inputs, prompt_ids)
        return JSONResponse(content)

    def _prompt_scores(self, request: ChatRequest, inputs: dict[str, Tensor], ids: list[int]) -> list[Any]:
        """Return one mapping for each prompt token: its id -> its score; None for the first."""
        scores = self.model.prompt_logprobs(inputs, request.model)
        pairs = zip(scores, ids[1:], strict=True)
        return [None, *({str(token_id): {"logprob": float(row[token_id])}} for row, token_id in pairs)]


def error_response(status: int, message: str) -> JSONResponse:
    """Return an error as vLLM words it."""
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
