"""The stub's routes: vLLM's own for chat, state and weight updates, behind the token guard."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Body, FastAPI, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from stage2_api.pod.ports import HEALTH_ROUTE
from stage2_trainer.serve.guard import TokenGuard
from stage2_trainer.serve.stub.chat_server import ChatServer, error_response
from stage2_trainer.serve.stub.requests import FinishRequest, FolderRequest, InitRequest, UnloadRequest, UpdateRequest
from stage2_trainer.serve.stub.stub_model import StubModel
from stage2_trainer.serve.stub.swift_routes import SwiftRoutes
from stage2_trainer.serve.stub.weight_updates import WeightUpdates
from stage2_trainer.sync.tensors.model_folder import ROUTE as FOLDER_ROUTE
from stage2_trainer.sync.tensors.model_folder import folder_digests
from stage2_trainer.sync.vllm.calls_route import CallsRoute
from stage2_trainer.sync.vllm.stuck_update import StuckUpdate
from stage2_trainer.wire.chat import CHAT_ROUTE
from stage2_trainer.wire.identity import ROUTE as IDENTITY_ROUTE
from stage2_trainer.wire.served_model import POLICY_MODEL

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
    app.add_middleware(StuckUpdate)
    app.add_middleware(CallsRoute)
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

    @app.get(IDENTITY_ROUTE)
    async def identity() -> dict[str, str | int]:
        return await run_in_threadpool(stub.model.identity)

    @app.post(FOLDER_ROUTE)
    async def folder(request: FolderRequest) -> Response:
        try:
            found = await run_in_threadpool(folder_digests, stub.root, request.tensors)
        except OSError as error:
            return JSONResponse({"error": str(error)}, status_code=409)
        return JSONResponse({"digests": found})

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
