"""The ASGI middleware by which a vLLM server tells how it reads prompts (`wire.identity`)."""

from __future__ import annotations

import asyncio
from typing import Any

from stage2_trainer.sync.vllm.asgi import App, Receive, Scope, Send, answer
from stage2_trainer.wire.identity import ROUTE, describe


class IdentityRoute:
    """The ASGI middleware by which a vLLM server answers GET /stage2/identity. The token guard stands before it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        found = await asyncio.to_thread(_of_vllm, scope["app"].state.vllm_config.model_config)
        await answer(send, 200, found)


def _of_vllm(model_config: Any) -> dict[str, str | int]:
    from vllm.transformers_utils.processor import cached_processor_from_config

    return describe(cached_processor_from_config(model_config))
