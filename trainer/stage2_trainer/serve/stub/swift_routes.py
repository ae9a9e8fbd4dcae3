"""The stub's second set of routes: those of `swift rollout` (semantics, section 11), over the same model.

As there, calls that begin a transfer are answered before it has happened.
"""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from typing import Any, Protocol

import torch
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from stage2_trainer.serve.stub.model import ChatRequest, StubModel
from stage2_trainer.sync.swift.swift_groups import GlooSwiftGroup
from stage2_trainer.wire.chat import IMAGE_TAG

STUB_RANK = 0
JOIN_TIMEOUT_S = 60.0


class Join(BaseModel):
    """Body of POST /init_communicator/."""

    host: str
    port: int
    world_size: int


class Piece(BaseModel):
    """One tensor in a flattened bucket: bytes `start_idx` to `end_idx`."""

    name: str
    shape: list[int]
    dtype: str
    start_idx: int
    end_idx: int
    numel: int


class Flattened(BaseModel):
    """Body of POST /update_flattened_params/."""

    metadatas: list[Piece] = Field(min_length=1)


class SwiftRequest(BaseModel):
    """One prompt: text with image tags, and the images beside it."""

    messages: list[dict[str, Any]]
    images: list[str] = []

    def openai_messages(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's format, images in their places."""
        images = iter(self.images)
        return [{**message, "content": _parts(message["content"], images)} for message in self.messages]


class Infer(BaseModel):
    """Body of POST /infer/."""

    infer_requests: list[SwiftRequest]
    request_config: dict[str, Any] = {}


class Server(Protocol):
    """The part of the stub that these routes need."""

    model: StubModel

    async def chat(self, request: ChatRequest) -> JSONResponse:
        """Answer one chat request."""
        ...


def _parts(content: str, images: Any) -> list[dict[str, Any]]:
    head, *tails = content.split(IMAGE_TAG)
    parts: list[dict[str, Any]] = [{"type": "text", "text": head}] if head else []
    for tail in tails:
        parts.append({"type": "image_url", "image_url": {"url": next(images)}})
        if tail:
            parts.append({"type": "text", "text": tail})
    return parts


class SwiftRoutes:
    """The state behind the routes: a transfer group, and the transfers under way."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._group: GlooSwiftGroup | None = None
        self._working = threading.Lock()  # transfers happen one after the other, in the order of their calls

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/health/", _health, methods=["GET"])
        app.add_api_route("/get_world_size/", _world_size, methods=["GET"])
        app.add_api_route("/get_engine_type/", _engine_type, methods=["POST"])
        app.add_api_route("/init_communicator/", self.join, methods=["POST"])
        app.add_api_route("/close_communicator/", self.leave, methods=["POST"])
        app.add_api_route("/update_flattened_params/", self.update, methods=["POST"])
        for name in ("process_weights_after_loading", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
            app.add_api_route(f"/{name}/", self.settle, methods=["POST"], name=name)
        app.add_api_route("/infer/", self.infer, methods=["POST"])

    async def join(self, request: Join) -> dict[str, str]:
        """Open the group, and wait in the background for the learner."""
        _in_thread(self._join, request)
        return {"message": "Request received, initializing communicator"}

    async def leave(self) -> dict[str, str]:
        """Leave the group."""
        self._group = None
        return {"message": "Request received, closing communicator"}

    async def update(self, request: Flattened) -> dict[str, str]:
        """Receive and load a bucket, in the background."""
        _in_thread(self._receive, request.metadatas)
        return {"message": "Request received, updating flattened parameters"}

    async def settle(self) -> dict[str, str]:
        """Return when the transfers before this call have ended."""
        await run_in_threadpool(self._wait)
        return {"message": "done"}

    async def infer(self, request: Infer) -> JSONResponse:
        """Answer every request, in order; refuse all where one is refused."""
        answers = [await self._answer(one, request.request_config) for one in request.infer_requests]
        refused = next((one for one in answers if one.status_code != HTTPStatus.OK), None)
        return refused or JSONResponse([{"response": json.loads(bytes(one.body))} for one in answers])

    async def _answer(self, request: SwiftRequest, config: dict[str, Any]) -> JSONResponse:
        fields = {name: value for name, value in config.items() if value is not None}
        chat = ChatRequest(messages=request.openai_messages(), return_token_ids=True, **fields)
        return await self._server.chat(chat)

    def _join(self, request: Join) -> None:
        with self._working:
            self._group = GlooSwiftGroup(request.host, request.port, STUB_RANK, request.world_size, JOIN_TIMEOUT_S)

    def _receive(self, pieces: list[Piece]) -> None:
        with self._working:
            group = self._group
            if group is None:
                raise RuntimeError("Communicator not initialized. Call `init_communicator` first.")
            flat = torch.empty(pieces[-1].end_idx, dtype=torch.uint8)
            group.receive(flat, JOIN_TIMEOUT_S)
            self._server.model.load_weights([(piece.name, _tensor(piece, flat)) for piece in pieces])

    def _wait(self) -> None:
        with self._working:
            pass


def _tensor(piece: Piece, flat: torch.Tensor) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype.removeprefix("torch."))
    return flat[piece.start_idx : piece.end_idx].clone().view(dtype).view(piece.shape)


def _in_thread(step: Any, *arguments: Any) -> None:
    threading.Thread(target=step, args=arguments, daemon=True).start()


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _world_size() -> dict[str, int]:
    return {"world_size": 1}


async def _engine_type() -> dict[str, Any]:
    return {"engine_type": "AsyncLLMEngine", "enable_multi_turn": False, "use_gym_env": False, "enable_lora": False}
