"""The CPU stub: a second, quick rollout server with vLLM's routes, for tests and rehearsals.

It generates with transformers, takes the same weight push, and is held to the same contract tests as vLLM
(tests/integration/test_server_contract.py). `stage2 serve CONFIG --server I --engine stub` runs it, or

    python -m stage2_trainer.serve.stub.app --model DIR --port 8000
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import Body, FastAPI, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from torch import Tensor

from stage2_api.pod.layout import HEALTH_ROUTE
from stage2_api.vllm import Transport
from stage2_trainer.serve.bounded_http import BoundedConfig
from stage2_trainer.serve.guard import TokenGuard
from stage2_trainer.serve.stub.chat import ChatServer, error_response
from stage2_trainer.serve.stub.model import AdapterInfo, StubModel
from stage2_trainer.serve.stub.swift_routes import SwiftRoutes
from stage2_trainer.sync.tensors.announcement import from_wire
from stage2_trainer.sync.transports.link import GroupInfo
from stage2_trainer.sync.transports.receiver import Load, Receiver
from stage2_trainer.sync.vllm.routes import Stage2Routes, UpdateWatch
from stage2_trainer.sync.vllm.server_merge import ServerMerge
from stage2_trainer.wire.chat import CHAT_ROUTE
from stage2_trainer.wire.credentials import read_token
from stage2_trainer.wire.requests import POLICY_MODEL


class UpdateInfo(BaseModel):
    """The tensors that follow, in order: base weights, an adapter's, or the parts that a recipe needs (`merge`).

    group: the name of the group that carries them. number: of this call in it (`Receiver.accept`).
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group: str
    number: int
    adapter: AdapterInfo | None = None
    merge: dict[str, Any] | None = None


class WeightUpdates:
    """Updates of a model's weights.

    root: its folder. max_lora_rank: the largest rank of an adapter that it accepts; None = it accepts no adapter.
    """

    def __init__(self, model: StubModel, root: str, receiver: Receiver, *, max_lora_rank: int | None) -> None:
        self.receiver = receiver
        self._model = model
        self._merge = ServerMerge(root, torch.device("cpu"))
        self._max_lora_rank = max_lora_rank
        self.version = "default"
        self._open: object | None = None  # the update under way

    def start(self) -> None:
        """Open an update. Raises RuntimeError if one is open."""
        if self._open is not None:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._open = object()

    def update(self, info: UpdateInfo) -> None:
        """Receive and load tensors."""
        mine = self._open
        if mine is None:
            raise RuntimeError("start_weight_update must be called before update_weights")
        metas = from_wire(info.names, info.dtype_names, info.shapes)
        receive = partial(self.receiver.receive, metas, group=info.group)
        self.receiver.accept(info.group, info.number)  # a late or repeated call closes nothing of this one's
        try:
            if info.adapter is not None:
                self._receive_adapter(receive, info.adapter)
            elif info.merge is not None:
                self._merge.update(info.merge, receive, self._model.load_weights)
            else:
                receive(self._model.load_weights)
        except BaseException:
            if self._open is mine:  # and not one that another learner has opened meanwhile
                self._open = None
            raise

    def _receive_adapter(self, receive: Callable[[Load], None], adapter: AdapterInfo) -> None:
        tensors: dict[str, Tensor] = {}
        receive(tensors.update)
        if self._max_lora_rank is None:
            raise RuntimeError("this server was started without --enable-lora")
        if (rank := adapter.config["r"]) > self._max_lora_rank:
            raise RuntimeError(f"LoRA rank {rank} is greater than max_lora_rank {self._max_lora_rank}")
        self._model.keep_adapter(adapter, tensors)

    def finish(self, version: str | None) -> None:
        """Close the update, under a version."""
        if self._open is None:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self._open = None
        self.version = version or self.version

    def join(self, init_info: dict[str, Any]) -> None:
        """Enter a learner's transfer group."""
        info = GroupInfo(**init_info)
        self.receiver.join(info, info.rank_offset)


def build_app(chats: ChatServer, updates: WeightUpdates, root: str) -> FastAPI:
    """Return the guarded application. root: the checkpoint's folder, as the list of models names it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        updates.receiver.leave_group()

    app = FastAPI(lifespan=lifespan)
    app.state.processor, app.state.model_folder = chats.model.processor, root  # for `Stage2Routes`
    app.add_middleware(UpdateWatch)
    app.add_middleware(Stage2Routes)
    app.add_middleware(TokenGuard)
    app.add_exception_handler(Exception, _internal_error)
    _add_serving_routes(app, chats, root)
    _add_control_routes(app, chats, updates)
    _add_update_routes(app, updates)
    SwiftRoutes(chats).add_to(app)
    return app


def _add_serving_routes(app: FastAPI, chats: ChatServer, root: str) -> None:
    app.add_api_route(CHAT_ROUTE, chats.chat, methods=["POST"])

    @app.get(HEALTH_ROUTE)
    async def health() -> Response:
        return Response()

    @app.post("/tokenize")
    async def tokenize(
        prompt: Annotated[str, Body()], add_special_tokens: Annotated[bool, Body()] = True
    ) -> dict[str, Any]:
        tokens = chats.model.processor.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return {"count": len(tokens), "max_model_len": chats.max_model_len, "tokens": tokens}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": POLICY_MODEL, "object": "model", "root": root, "max_model_len": chats.max_model_len}
        adapters = [{"id": name, "object": "model", "parent": POLICY_MODEL} for name in chats.model.adapters]
        return {"object": "list", "data": [model, *adapters]}

    @app.get("/get_world_size")
    async def world_size() -> dict[str, int]:
        return {"world_size": 1}

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(lora_name: Annotated[str, Body(embed=True)]) -> Response:
        if not await run_in_threadpool(chats.model.unload_adapter, lora_name):
            return error_response(404, f"The lora adapter '{lora_name}' cannot be found.")
        return Response(f"Success: LoRA adapter '{lora_name}' removed successfully.")


def _add_control_routes(app: FastAPI, chats: ChatServer, updates: WeightUpdates) -> None:
    @app.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": updates.version}

    @app.post("/update_weight_version")
    async def update_version(new_version: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
        updates.version = new_version
        return {"success": True, "new_version": new_version}

    @app.post("/pause")
    async def pause(mode: Annotated[str, Query()] = "abort") -> dict[str, str]:
        chats.running.clear()
        if mode == "abort":
            await run_in_threadpool(chats.model.abort)
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        chats.running.set()
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": not chats.running.is_set()}

    for cache in ("prefix", "mm", "encoder"):
        app.add_api_route(f"/reset_{cache}_cache", _nothing_to_reset, methods=["POST"], name=f"reset_{cache}_cache")


def _add_update_routes(app: FastAPI, updates: WeightUpdates) -> None:
    @app.post("/init_weight_transfer_engine")
    async def init(init_info: Annotated[dict[str, Any], Body(embed=True)]) -> dict[str, str]:
        await run_in_threadpool(updates.join, init_info)
        return {"message": "Weight transfer initialized"}

    @app.post("/start_weight_update")
    async def start() -> dict[str, str]:
        updates.start()
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def update(update_info: Annotated[UpdateInfo, Body(embed=True)]) -> dict[str, str]:
        await run_in_threadpool(updates.update, update_info)
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update")
    async def finish(weight_version: Annotated[str | None, Body(embed=True)] = None) -> dict[str, str]:
        updates.finish(weight_version)
        return {"message": "Weight update finished"}


async def _nothing_to_reset() -> dict[str, bool]:
    return {"success": True}  # nothing outlives a request here


async def _internal_error(_: Any, error: Exception) -> JSONResponse:
    return error_response(500, f"{type(error).__name__}: {error}")


def receiver(transport: Transport) -> Receiver:
    """Return the worker's end of pushes over a transport."""
    on_gpu = transport == "nccl"
    return Receiver(transport, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


def main(receiver_over: Callable[[Transport], Receiver] = receiver) -> None:
    """Serve until terminated."""
    args = _arguments()
    read_token(os.environ)  # without one it must not load a model first
    dummy = args.load_format == "dummy"
    model = StubModel(args.model, dtype=args.dtype, dummy=dummy, processor_options=args.mm_processor_kwargs)
    max_lora_rank = args.max_lora_rank if args.enable_lora else None
    updates = WeightUpdates(model, args.model, receiver_over(args.transport), max_lora_rank=max_lora_rank)
    app = build_app(ChatServer(model, max_model_len=args.max_model_len), updates, args.model)
    tls = {"ssl_certfile": args.ssl_certfile, "ssl_keyfile": args.ssl_keyfile}
    uvicorn.Server(BoundedConfig(app, host=args.host, port=args.port, log_level="warning", **tls)).run()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ssl-certfile", help="answer over TLS with this certificate")
    parser.add_argument("--ssl-keyfile", help="its private key")
    parser.add_argument("--dtype", default="auto", help="torch dtype name, or auto: the checkpoint's")
    parser.add_argument("--max-model-len", type=int, default=4096, help="prompt + answer, tokens")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto", help="dummy: random weights")
    parser.add_argument("--mm-processor-kwargs", type=json.loads, default={}, help="JSON: min_pixels, max_pixels")
    parser.add_argument("--transport", choices=["tcp", "nccl"], default="tcp", help="what weights come over")
    parser.add_argument("--enable-lora", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    return parser.parse_args()


if __name__ == "__main__":
    main()
