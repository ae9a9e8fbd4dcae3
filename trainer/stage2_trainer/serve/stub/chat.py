"""The stub's answers to chat requests, with the fields that vLLM adds to OpenAI's."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from torch import Tensor

from stage2_trainer.serve.stub.model import ChatRequest, Generated, StubModel
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
        answers = [await run_in_threadpool(self.model.generate, inputs, one) for one in _each(request)]
        completion = sum(len(answer.token_ids) for answer in answers)
        content: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model or POLICY_MODEL,
            "choices": [self._choice(index, answer, request) for index, answer in enumerate(answers)],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": completion,
                "total_tokens": len(prompt_ids) + completion,
            },
            "prompt_token_ids": prompt_ids if request.return_token_ids else None,
        }
        if request.prompt_logprobs is not None:
            scores = await run_in_threadpool(self.model.prompt_logprobs, inputs, request.model)
            content["prompt_logprobs"] = [None, *self._prompt_scores(scores, prompt_ids[1:], request.prompt_logprobs)]
        return JSONResponse(content)

    def _choice(self, index: int, answer: Generated, request: ChatRequest) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text},
            "finish_reason": answer.finish_reason,
            "token_ids": answer.token_ids if request.return_token_ids else None,
            "logprobs": None,
        }
        if request.logprobs:
            pairs = zip(answer.logprobs, answer.token_ids, strict=True)
            choice["logprobs"] = {"content": [self._token_score(s, t, request.top_logprobs) for s, t in pairs]}
        return choice

    def _token_score(self, scores: Tensor, token_id: int, top: int) -> dict[str, Any]:
        def score(i: int) -> dict[str, Any]:
            text = self.model.decode(i)
            return {"token": text, "logprob": float(scores[i]), "bytes": list(text.encode())}

        return {**score(token_id), "top_logprobs": [score(i) for i in scores.topk(top).indices.tolist()]}

    def _prompt_scores(self, scores: Tensor, ids: list[int], top: int) -> list[dict[str, Any]]:
        """One mapping for each prompt token but the first: id -> score, for the token itself and the `top` best."""
        ranks = (scores > scores.gather(1, scores.new_tensor(ids).long().unsqueeze(1))).sum(1) + 1
        found = []
        for row, token_id, rank in zip(scores, ids, ranks.tolist(), strict=True):
            best = {i: n for n, i in enumerate(row.topk(top).indices.tolist(), start=1)}
            entries = {token_id: rank, **best}
            found.append(
                {
                    str(i): {"logprob": float(row[i]), "rank": n, "decoded_token": self.model.decode(i)}
                    for i, n in entries.items()
                }
            )
        return found


def _each(request: ChatRequest) -> list[ChatRequest]:
    """Return a request for each of `n` answers; as vLLM does, answer i is drawn with the seed + i."""
    seeds = [None if request.seed is None else request.seed + i for i in range(request.n)]
    return [request.model_copy(update={"seed": seed}) for seed in seeds]


def error_response(status: int, message: str) -> JSONResponse:
    """Return an error as vLLM words it."""
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
