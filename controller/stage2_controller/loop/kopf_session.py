"""The session with which kopf asks: a list that expires while it is read page by page begins again.

kopf takes the API server's 410 for a bug, and ends the operator. It begins a list again where the connection broke, and
that is what the session tells it.
"""

import asyncio
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
import kopf

_PAUSE_S = 1.0  # before a list begins again: one that always expires must not become a storm


@dataclass(frozen=True, kw_only=True)
class _Session(kopf.AiohttpSession):
    """A session that equals others with the same credentials: kopf ends where a login brings refused ones again."""

    aiohttp_session: aiohttp.ClientSession = field(compare=False)
    credentials: kopf.ConnectionInfo


def session_of(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """Return a session with these credentials, as kopf makes its own; called while the event loop runs."""
    made = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        middlewares=(_lists_again,),
    )
    return _Session(
        credentials=info,
        server=info.server,
        aiohttp_session=made,
        priority=info.priority,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
    )


async def _lists_again(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    answer = await handler(request)
    if answer.status == HTTPStatus.GONE and "continue" in request.url.query:
        answer.release()
        await asyncio.sleep(_PAUSE_S)
        raise aiohttp.ClientPayloadError(f"{request.url.path}: the list expired before its last page: it begins again")
    return answer
