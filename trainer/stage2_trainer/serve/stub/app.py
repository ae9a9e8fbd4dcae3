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
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import Body, FastAPI, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from stage2_api.pod.layout import HEALTH_ROUTE
from stage2_api.vllm import Transport
from stage2_trainer.serve.guard import TokenGuard
from stage2_trainer.serve.stub.chat import (
    ChatServer,
    error_response,
)
from stage2_trainer.serve.stub.model import StubModel
from stage2_trainer.serve.stub.swift_routes import SwiftRoutes
from stage2_trainer.serve.stub.updates import FinishRequest, InitRequest, UpdateRequest, WeightUpdates
from stage2_trainer.sync.transports.nccl import CreateCommunicator, open_nccl
from stage2_trainer.sync.transports.receiver import Receiver
from stage2_trainer.sync.transports.tcp import open_tcp
from stage2_trainer.sync.vllm.routes import Stage2Routes, UpdateWatch
from stage2_trainer.wire.chat import CHAT_ROUTE
from stage2_trainer.wire.credentials import read_token
from stage2_trainer.wire.requests import POLICY_MODEL


class UnloadRequest(BaseModel):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str


WORLD_SIZE = 1


@dataclass(frozen=True)
class Stub:
    """The state behind the routes. root: the checkpoint's folder, as the list of models names it."""

    model: StubModel
    chats: ChatServer
    updates: WeightUpdates
    root: str


def build_app(stub: Stub) -> FastAPI:
    """Return the guarded application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        stub.updates.receiver.leave()

    app = FastAPI(lifespan=lifespan)
    app.state.processor, app.state.model_folder = stub.model.processor, stub.root  # for `Stage2Routes`
    app.add_middleware(UpdateWatch)
    app.add_middleware(Stage2Routes)
    app.add_middleware(TokenGuard)
    app.add_exception_handler(Exception, _internal_error)
    _add_serving_routes(app, stub)
    _add_control_routes(app, stub)
    _add_update_routes(app, stub)
    SwiftRoutes(stub.chats).add_to(app)
    return app


def _add_serving_routes(app: FastAPI, stub: Stub) -> None:
    app.add_api_route(CHAT_ROUTE, stub.chats.chat, methods=["POST"])

    @app.get(HEALTH_ROUTE)
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": POLICY_MODEL, "object": "model", "root": stub.root, "max_model_len": stub.chats.max_model_len}
        adapters = [{"id": name, "object": "model", "parent": POLICY_MODEL} for name in stub.model.adapters]
        return {"object": "list", "data": [model, *adapters]}

    @app.get("/get_world_size")
    async def world_size() -> dict[str, int]:
        return {"world_size": WORLD_SIZE}


def _add_control_routes(app: FastAPI, stub: Stub) -> None:
    @app.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": stub.updates.version}

    @app.post("/update_weight_version")
    async def update_version(new_version: Annotated[str, Body(embed=True)]) -> dict[str, Any]:
        stub.updates.version = new_version
        return {"success": True, "new_version": new_version}

    @app.post("/pause")
    async def pause(mode: Annotated[str, Query()] = "abort") -> dict[str, str]:
        stub.chats.running.clear()
        if mode == "abort":
            await run_in_threadpool(stub.model.abort)
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        stub.chats.running.set()
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": not stub.chats.running.is_set()}


def _add_update_routes(app: FastAPI, stub: Stub) -> None:
    @app.post("/init_weight_transfer_engine")
    async def init(request: InitRequest) -> dict[str, str]:
        await run_in_threadpool(stub.updates.join, request.init_info)
        return {"message": "Weight transfer initialized"}

    @app.post("/shutdown_weight_transfer_engine")
    async def shutdown() -> dict[str, str]:
        await run_in_threadpool(stub.updates.receiver.leave)
        return {"message": "Weight transfer shut down"}

    @app.post("/start_weight_update")
    async def start() -> dict[str, str]:
        stub.updates.start()
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def update(request: UpdateRequest) -> dict[str, str]:
        await run_in_threadpool(stub.updates.update, request)
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update")
    async def finish(request: FinishRequest | None = None) -> dict[str, str]:
        stub.updates.finish(request.weight_version if request else None)
        return {"message": "Weight update finished"}

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(request: UnloadRequest) -> Response:
        if not await run_in_threadpool(stub.model.unload_adapter, request.lora_name):
            return error_response(404, f"The lora adapter '{request.lora_name}' cannot be found.")
        return Response(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, bool]:
        return {"success": True}  # nothing outlives a request here

    app.add_api_route("/reset_mm_cache", _nothing_to_reset, methods=["POST"])
    app.add_api_route("/reset_encoder_cache", _nothing_to_reset, methods=["POST"])


async def _nothing_to_reset() -> Response:
    return Response()


async def _internal_error(_: Any, error: Exception) -> JSONResponse:
    return error_response(500, f"{type(error).__name__}: {error}")


def receiver(
    transport: Transport,
    device: torch.device | None = None,
    communicator: CreateCommunicator | None = None,
) -> Receiver:
    """Return what takes part in pushes over a transport.

    device, communicator: where buckets arrive over NCCL (None = this process's GPU), and what a group speaks with.
    """
    if transport == "tcp":
        return Receiver("tcp", open_tcp)
    place = device or torch.device("cuda", torch.cuda.current_device())
    return Receiver("nccl", partial(open_nccl, device=place, communicator=communicator))


def main(receiver_over: Callable[[Transport], Receiver] = receiver) -> None:
    """Serve until terminated."""
    args = _arguments()
    read_token(os.environ)  # a missing token ends it before anything is loaded
    model = StubModel(
        args.model,
        dtype=args.dtype,
        dummy=args.load_format == "dummy",
        processor_options=args.mm_processor_kwargs,
    )
    stub = Stub(
        model,
        ChatServer(model, max_model_len=args.max_model_len),
        WeightUpdates(
            model,
            args.model,
            receiver_over(args.transport),
            max_lora_rank=args.max_lora_rank if args.enable_lora else None,
        ),
        root=args.model,
    )
    tls = {"ssl_certfile": args.ssl_certfile, "ssl_keyfile": args.ssl_keyfile}
    uvicorn.run(build_app(stub), host=args.host, port=args.port, log_level="warning", **tls)


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
