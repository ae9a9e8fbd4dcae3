"""The CPU stub: a second, quick rollout server with vLLM's routes, for tests and rehearsals.

It generates with transformers, takes the same gloo weight push, and is held to the same contract tests as vLLM
(tests/integration/test_server_contract.py). `stage2 serve CONFIG --server I --engine stub` runs it, or

    python -m stage2_trainer.stub.app --model DIR --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
import uuid
from contextlib import asynccontextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from stage2_api.pod.ports import HEALTH_ROUTE
from stage2_trainer.engine.gloo_receiver import Receiver
from stage2_trainer.engine.guard import TokenGuard
from stage2_trainer.stub.model import Generated, StubModel
from stage2_trainer.stub.requests import (
    AdapterInfo,
    ChatRequest,
    FinishRequest,
    InitRequest,
    UnloadRequest,
    UpdateRequest,
)
from stage2_trainer.stub.swift_routes import SwiftRoutes
from stage2_trainer.wire.buckets import TensorMeta, from_wire
from stage2_trainer.wire.chat import CHAT_ROUTE
from stage2_trainer.wire.gloo_group import GroupInfo
from stage2_trainer.wire.identity import ROUTE as IDENTITY_ROUTE
from stage2_trainer.wire.served_model import POLICY_MODEL
from stage2_trainer.wire.token import read_token

WORLD_SIZE = 1
INITIAL_VERSION = "default"


class Stub:
    """The state behind the routes. max_lora_rank: of adapters that are taken; None = none are."""

    def __init__(self, model: StubModel, *, max_model_len: int, root: str, max_lora_rank: int | None) -> None:
        self.model = model
        self.max_lora_rank = max_lora_rank
        self.max_model_len = max_model_len
        self.root = root
        self.receiver = Receiver()
        self.version = INITIAL_VERSION
        self.updating = False
        self.running = asyncio.Event()
        self.running.set()

    async def chat(self, request: ChatRequest) -> JSONResponse:
        """Answer one chat request."""
        if not self.model.serves(request.model):
            return _error(404, f"The model `{request.model}` does not exist.")
        try:
            inputs = await run_in_threadpool(self.model.encode, request.messages)
        except (ValueError, KeyError) as error:
            return _error(400, f"{type(error).__name__}: {error}")
        prompt_ids: list[int] = inputs["input_ids"][0].tolist()
        if len(prompt_ids) + request.max_tokens > self.max_model_len:
            return _error(400, f"prompt ({len(prompt_ids)}) + max_tokens ({request.max_tokens}) > {self.max_model_len}")
        await self.running.wait()
        answer = await run_in_threadpool(self.model.generate, inputs, request)
        content: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model or POLICY_MODEL,
            "choices": [self._choice(answer, request)],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(answer.token_ids),
                "total_tokens": len(prompt_ids) + len(answer.token_ids),
            },
            "prompt_token_ids": prompt_ids if request.return_token_ids else None,
        }
        if request.prompt_logprobs is not None:
            scores = await run_in_threadpool(self.model.prompt_logprobs, inputs, request.model)
            content["prompt_logprobs"] = [None, *self._prompt_scores(scores, prompt_ids[1:], request.prompt_logprobs)]
        return JSONResponse(content)

    def _choice(self, answer: Generated, request: ChatRequest) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
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

    def start_update(self) -> None:
        """Open an update. Raises RuntimeError if one is open."""
        if self.updating:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.updating = True

    def update(self, request: UpdateRequest) -> None:
        """Receive and load tensors."""
        if not self.updating:
            raise RuntimeError("start_weight_update must be called before update_weights")
        info = request.update_info
        metas = from_wire(info.names, info.dtype_names, info.shapes)
        try:
            if info.adapter is None:
                self.receiver.receive(metas, self.model.load_weights)
            else:
                self._receive_adapter(metas, info.adapter)
        except BaseException:
            self.updating = False
            raise

    def _receive_adapter(self, metas: list[TensorMeta], adapter: AdapterInfo) -> None:
        tensors: dict[str, Tensor] = {}
        self.receiver.receive(metas, tensors.update)
        if self.max_lora_rank is None:
            raise RuntimeError("this server was started without --enable-lora")
        if (rank := adapter.config["r"]) > self.max_lora_rank:
            raise RuntimeError(f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}")
        self.model.keep_adapter(adapter, tensors)

    def finish_update(self, version: str | None) -> None:
        """Close the update, under a version."""
        if not self.updating:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.updating = False
        self.version = version or self.version

    def join(self, init_info: dict[str, Any]) -> None:
        """Enter a learner's transfer group."""
        info = GroupInfo(**init_info)
        self.receiver.join(info, info.rank_offset)


def build_app(stub: Stub) -> FastAPI:
    """Return the guarded application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        stub.receiver.leave()

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(TokenGuard)
    app.add_exception_handler(Exception, _internal_error)
    _add_serving_routes(app, stub)
    _add_update_routes(app, stub)
    SwiftRoutes(stub).add_to(app)
    return app


def _add_serving_routes(app: FastAPI, stub: Stub) -> None:
    app.add_api_route(CHAT_ROUTE, stub.chat, methods=["POST"])

    @app.get(HEALTH_ROUTE)
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": POLICY_MODEL, "object": "model", "root": stub.root, "max_model_len": stub.max_model_len}
        adapters = [{"id": name, "object": "model", "parent": POLICY_MODEL} for name in stub.model.adapters]
        return {"object": "list", "data": [model, *adapters]}

    @app.get(IDENTITY_ROUTE)
    async def identity() -> dict[str, str | int]:
        return await run_in_threadpool(stub.model.identity)

    @app.get("/get_world_size")
    async def world_size() -> dict[str, int]:
        return {"world_size": WORLD_SIZE}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": stub.version}

    @app.post("/update_weight_version")
    async def update_version(new_version: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
        stub.version = new_version
        return {"success": True, "new_version": new_version}

    @app.post("/pause")
    async def pause(mode: Annotated[str, Query()] = "abort") -> dict[str, str]:
        stub.running.clear()
        if mode == "abort":
            await run_in_threadpool(stub.model.abort)
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        stub.running.set()
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": not stub.running.is_set()}


def _add_update_routes(app: FastAPI, stub: Stub) -> None:
    @app.post("/init_weight_transfer_engine")
    async def init(request: InitRequest) -> dict[str, str]:
        await run_in_threadpool(stub.join, request.init_info)
        return {"message": "Weight transfer initialized"}

    @app.post("/shutdown_weight_transfer_engine")
    async def shutdown() -> dict[str, str]:
        await run_in_threadpool(stub.receiver.leave)
        return {"message": "Weight transfer shut down"}

    @app.post("/start_weight_update")
    async def start() -> dict[str, str]:
        stub.start_update()
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def update(request: UpdateRequest) -> dict[str, str]:
        await run_in_threadpool(stub.update, request)
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update")
    async def finish(request: FinishRequest | None = None) -> dict[str, str]:
        stub.finish_update(request.weight_version if request else None)
        return {"message": "Weight update finished"}

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(request: UnloadRequest) -> Response:
        if not await run_in_threadpool(stub.model.unload_adapter, request.lora_name):
            return _error(404, f"The lora adapter '{request.lora_name}' cannot be found.")
        return Response(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, bool]:
        return {"success": True}  # nothing outlives a request here

    app.add_api_route("/reset_mm_cache", _nothing_to_reset, methods=["POST"])
    app.add_api_route("/reset_encoder_cache", _nothing_to_reset, methods=["POST"])


async def _nothing_to_reset() -> Response:
    return Response()


async def _internal_error(_: Any, error: Exception) -> JSONResponse:
    return _error(500, f"{type(error).__name__}: {error}")


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="auto", help="torch dtype name, or auto: the checkpoint's")
    parser.add_argument("--max-model-len", type=int, default=4096, help="prompt + answer, tokens")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto", help="dummy: random weights")
    parser.add_argument("--mm-processor-kwargs", type=json.loads, default={}, help="JSON: min_pixels, max_pixels")
    parser.add_argument("--enable-lora", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    args = parser.parse_args()
    read_token(os.environ)  # a missing token shall be said before anything is loaded
    model = StubModel(
        args.model,
        dtype=args.dtype,
        dummy=args.load_format == "dummy",
        processor_options=args.mm_processor_kwargs,
    )
    max_lora_rank = args.max_lora_rank if args.enable_lora else None
    stub = Stub(model, max_model_len=args.max_model_len, root=args.model, max_lora_rank=max_lora_rank)
    uvicorn.run(build_app(stub), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
