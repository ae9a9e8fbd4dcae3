"""The HTTP of vLLM's server and of the stub, with bounds on strangers: clients that have not shown the job's token.

uvicorn with httptools keeps headers of any size, waits for them and for a TLS handshake as long as a client likes, and
bounds neither connections nor requests that wait behind another on one connection. A token guard runs too late to help:
after the headers. So each connection counts as a stranger's from its first packet, before TLS, until the guard has seen
the token in one of its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from stage2_trainer.serve.guard import WELCOME

MOST_STRANGERS = 2048
"""A learner is a stranger too until its first request has arrived, and it opens hundreds of connections at once."""
LONGEST_S = 30.0
"""Seconds of a stranger's connection, from its first packet to its last."""
MOST_HEAD_BYTES = 2**16
"""Of a request line with its headers, of trailers, and of what surrounds the parts of a chunked body."""
MOST_HEADERS = 128
MOST_QUEUED = 8
"""Requests behind another one on a connection. Some middlewares end an answer after its last byte, when the client may
have sent its next request already."""
STOPPING_S = 1


class TooMuch(Exception):
    """A client sends more than a bound allows; uvicorn answers 400 and closes the connection."""


class Strangers:
    """The open connections of strangers, in the order in which they came.

    One more than MOST_STRANGERS ends the oldest, rather than be refused: otherwise whoever holds that many would keep
    out the kubelet's probes and the learner, who need few round trips.
    """

    def __init__(self) -> None:
        self._deadlines: dict[BoundedProtocol, asyncio.TimerHandle] = {}

    def add(self, connection: BoundedProtocol) -> None:
        """Count a new connection, and end it after LONGEST_S."""
        self._deadlines[connection] = connection.loop.call_later(LONGEST_S, connection.end)
        if len(self._deadlines) > MOST_STRANGERS:
            oldest = next(iter(self._deadlines))
            self.remove(oldest)
            oldest.end()

    def remove(self, connection: BoundedProtocol) -> None:
        """Bound a connection no longer: it has shown the token, or it has ended."""
        if deadline := self._deadlines.pop(connection, None):
            deadline.cancel()


class BoundedConfig(uvicorn.Config):
    """uvicorn's settings with bounds.

    Requests under way are dropped `STOPPING_S` after the server was asked to stop. vLLM ends its engine first, sets no
    such limit and has no option for it, so its pod would end only with its grace period.
    """

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **{"http": BoundedProtocol, "timeout_graceful_shutdown": STOPPING_S, **options})
        self.strangers = Strangers()
        self.tls: ssl.SSLContext | None = None

    def load(self) -> None:
        """Load, and take TLS from the event loop, which would hide connections until their handshake is complete."""
        super().load()
        self.tls, self.ssl = self.ssl, None


class BoundedProtocol(HttpToolsProtocol):
    """A connection: first TLS, where the server has a certificate, then HTTP."""

    config: BoundedConfig

    def __init__(
        self,
        config: BoundedConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        welcome = partial(config.strangers.remove, self)
        super().__init__(config, server_state, {**app_state, WELCOME: welcome}, _loop)
        self._socket: socket.socket | None = None  # below TLS
        self._handshake: asyncio.Task[None] | None = None
        self._unread_bytes = 0  # since the last whole head, or the last byte of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and begin with TLS or HTTP.

        For TLS the connection goes back to the event loop, as one that somebody else has accepted. (`start_tls` loses
        the client's first bytes: uvloop reads them as soon as this returns.)
        """
        if self._socket is not None:  # after the handshake
            super().connection_made(transport)
            return
        self.config.strangers.add(self)
        if self.config.tls is None:
            super().connection_made(transport)
            return
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        transport.set_protocol(asyncio.Protocol())
        transport.abort()
        self._handshake = self.loop.create_task(self._shake_hands(self._socket, self.config.tls))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.config.strangers.remove(self)
        super().connection_lost(exc)

    def end(self) -> None:
        """End the connection at once, in a handshake too."""
        if self.scheme is not None:  # HTTP has begun
            self.transport.abort()
        elif self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)

    def data_received(self, data: bytes) -> None:
        """Read on; end a connection whose head is too large."""
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request has at most {MOST_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        """Answer, and read no more: TLS alone would read on until the client ends it too."""
        super().send_400_response(msg)
        self.loop.call_soon(self.end)

    def on_message_begin(self) -> None:
        """Begin a request, if not too many wait."""
        if len(self.pipeline) >= MOST_QUEUED:
            raise TooMuch
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, if there are not too many."""
        if len(self.headers) >= MOST_HEADERS:
            raise TooMuch
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self._unread_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._unread_bytes = 0
        super().on_body(body)

    async def _shake_hands(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: self, accepted, ssl=tls)
        except OSError:  # no TLS, or the client has gone
            self.config.strangers.remove(self)
