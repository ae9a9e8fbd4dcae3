"""The ASGI middleware by which a vLLM server tells digests of its model folder's tensors (`weights.model_folder`)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from stage2_trainer.sync.tensors.model_folder import ROUTE, folder_digests
from stage2_trainer.sync.vllm.asgi import App, Receive, Scope, Send, answer, body_of


class FolderRoute:
    """The ASGI middleware by which a vLLM server answers POST /stage2/folder-digests, behind the token guard."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        asked = json.loads(await body_of(receive))
        model: str = scope["app"].state.vllm_config.model_config.model
        try:
            found: dict[str, Any] = await asyncio.to_thread(folder_digests, model, asked["tensors"])
        except OSError as error:
            await answer(send, 409, {"error": str(error)})
            return
        await answer(send, 200, {"digests": found})
