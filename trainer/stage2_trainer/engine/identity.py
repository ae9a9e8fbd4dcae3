"""What decides as which ids a prompt is read: tokenizer, chat template, and how large images become.

Both sides describe themselves with this module. A server does so at GET /stage2/identity: the stub by a route of its
own, vLLM through `IdentityRoute`, which asks the processor that the running engine uses.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTE = "/stage2/identity"
STATE_OF_CALLS = ("truncation", "padding")  # parts of a tokenizer that calls leave behind; they tell nothing about it


def describe(processor: Any) -> dict[str, str | int]:
    """Return the identity of a Hugging Face processor, a flat JSON object."""
    tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    told = {name: part for name, part in tokenizer.items() if name not in STATE_OF_CALLS}
    images = processor.image_processor
    return {
        "tokenizer_sha256": _sha256(json.dumps(told, sort_keys=True)),
        "chat_template_sha256": _sha256(processor.chat_template or processor.tokenizer.chat_template or ""),
        "image_min_pixels": int(images.size["shortest_edge"]),
        "image_max_pixels": int(images.size["longest_edge"]),
        "image_patch_size": int(images.patch_size),
        "image_merge_size": int(images.merge_size),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class IdentityRoute:
    """The ASGI middleware by which a vLLM server answers GET /stage2/identity. The token guard stands before it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        found = await asyncio.to_thread(_of_vllm, scope["app"].state.vllm_config.model_config)
        body = json.dumps(found).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _of_vllm(model_config: Any) -> dict[str, str | int]:
    from vllm.transformers_utils.processor import cached_processor_from_config

    return describe(cached_processor_from_config(model_config))
