"""The stub's second set of routes: those of `swift rollout` (semantics, section 11), over the same model.

As there, calls that begin a transfer are answered before it has happened.
"""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from typing import Annotated, Any

import torch
from fastapi import Body, FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from stage2_trainer.serve.stub.chat import ChatServer
from stage2_trainer.serve.stub.model import ChatRequest
from stage2_trainer.sync.swift.swift_groups import GlooSwiftGroup
from stage2_trainer.wire.chat import IMAGE_TAG

STUB_RANK = 0
JOIN_TIMEOUT_S = 60.0


class Piece(BaseModel):
    """One tensor in a flattened bucket: bytes `start_idx` to `end_idx`."""

    name: str
    shape: list[int]
    dtype: str
    start_idx: int
    end_idx: int
    numel: int


class SwiftRequest(BaseModel):
    """One prompt: text with image tags, and the images beside it."""

    messages: list[dict[str, Any]]
    images: list[str] = []

    def openai_messages(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's format, images in their places."""
        images = iter(self.images)
        return [{**message, "content": _parts(message["content"], images)} for message in self.messages]


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

    def __init__(self, chats: ChatServer) -> None:
        self._chats = chats
        self._group: GlooSwiftGroup | None = None
        self._working = threading.Lock()  # transfers happen one after the other, in the order of their calls

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/health/", _health, methods=["GET"])
        app.add_api_route("/get_world_size/", _world_size, methods=["GET"])
        app.add_api_route("/init_communicator/", self.join, methods=["POST"])
        app.add_api_route("/close_communicator/", self.close_communicator, methods=["POST"])
        app.add_api_route("/update_flattened_params/", self.update, methods=["POST"])
        for name in ("process_weights_after_loading", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"):
            app.add_api_route(f"/{name}/", self.settle, methods=["POST"], name=name)
        app.add_api_route("/infer/", self.infer, methods=["POST"])

    async def join(
        self, host: Annotated[str, Body()], port: Annotated[int, Body()], world_size: Annotated[int, Body()]
    ) -> dict[str, str]:
        """Open the group, and wait in the background for the learner."""
        threading.Thread(target=self._join, args=(host, port, world_size), daemon=True).start()
        return {"message": "Request received, initializing communicator"}

    async def close_communicator(self) -> dict[str, str]:
        """Leave the group."""
        self._group = None
        return {"message": "Request received, closing communicator"}

    async def update(self, metadatas: Annotated[list[Piece], Body(embed=True, min_length=1)]) -> dict[str, str]:
        """Receive and load a bucket, in the background."""
        threading.Thread(target=self._receive, args=(metadatas,), daemon=True).start()
        return {"message": "Request received, updating flattened parameters"}

    async def settle(self) -> dict[str, str]:
        """Return when the transfers before this call have ended."""
        await run_in_threadpool(self._wait)
        return {"message": "done"}

    async def infer(
        self, infer_requests: Annotated[list[SwiftRequest], Body()], request_config: Annotated[dict[str, Any], Body()]
    ) -> JSONResponse:
        """Answer every request, in order; refuse all if one is refused."""
        config = {name: value for name, value in request_config.items() if value is not None}
        chats = [ChatRequest(messages=one.openai_messages(), return_token_ids=True, **config) for one in infer_requests]
        answers = [await self._chats.chat(chat) for chat in chats]
        refused = next((one for one in answers if one.status_code != HTTPStatus.OK), None)
        return refused or JSONResponse([{"response": json.loads(bytes(one.body))} for one in answers])

    def _join(self, host: str, port: int, world_size: int) -> None:
        with self._working:
            self._group = GlooSwiftGroup(host, port, STUB_RANK, world_size, JOIN_TIMEOUT_S)

    def _receive(self, pieces: list[Piece]) -> None:
        with self._working:
            if self._group is None:
                raise RuntimeError("Communicator not initialized. Call `init_communicator` first.")
            flat = torch.empty(pieces[-1].end_idx, dtype=torch.uint8)
            self._group.receive(flat, JOIN_TIMEOUT_S)
            self._chats.model.load_weights([(piece.name, _tensor(piece, flat)) for piece in pieces])

    def _wait(self) -> None:
        with self._working:
            pass


def _tensor(piece: Piece, flat: torch.Tensor) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype.removeprefix("torch."))
    return flat[piece.start_idx : piece.end_idx].clone().view(dtype).view(piece.shape)


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _world_size() -> dict[str, int]:
    return {"world_size": 1}
