"""The learner's end of a transfer to one server: a port that only the server's workers may dial.

Over TCP the links themselves carry the weights; `nccl.NcclTransfer` sends NCCL's id over them.

The server's guarded route names the port to its workers; a worker must prove the job's token (`link`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from stage2_api.vllm import Transport
from stage2_trainer.process.background import in_background
from stage2_trainer.sync.transports.link import (
    INIT_PHASE,
    LEARNER_RANK,
    GroupInfo,
    Link,
    Member,
    abort_all,
    address_towards,
    new_group_name,
)
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.credentials import host_and_port, required_certificate
from stage2_trainer.wire.errors import LinkError, ServerError
from stage2_trainer.wire.update_routes import INIT_ROUTE

logger = logging.getLogger(__name__)

# A server waits for the next bucket while the learner gives each of its servers `timeout_s` for this one.
SERVER_PATIENCE = 2
ADMISSION_TIMEOUT_S = 10.0
MAX_HALF_OPEN = 256
BACKLOG = 1024
CHECK_INTERVAL_S = 0.05
ACCEPT_PAUSE_S = 0.05  # after an error of accept(), such as too many open files

Ranks = Callable[[int], tuple[int, int]]
"""For a number of workers: the rank of the first one, and the number of the group's members."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A bucket to send.

    parts: its bytes, in order: uint8, flat. ready: the CUDA event after which they are complete; None = they are.
    """

    parts: Sequence[torch.Tensor]
    ready: Any = None


def ranks_alone(workers: int) -> tuple[int, int]:
    """Return the ranks of workers in a group that they share with the learner only."""
    return LEARNER_RANK + 1, workers + 1


class WeightTransfer:
    """The transfer of weights to one server, over TCP: the learner's port, and links to the workers that dialled it.

    transport: what carries the weights. staging: the device that its buckets must be on. group: the name of the group
    that was formed last; empty before. timeout_s: seconds that forming a group, or sending a bucket, may take.
    """

    transport: Transport = "tcp"
    staging = torch.device("cpu")

    def __init__(self, port: int, *, token: str, bucket_bytes: int, timeout_s: float) -> None:
        self.group = ""
        self._port = port
        self._token = token
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._links: list[Link] = []
        self._sent_before = 0  # over closed links, and to NCCL
        self._listener: LinkListener | None = None  # opened once: the port stays ours while a lost server is awaited

    def connect(self, client: ServerClient) -> None:
        """Form the group with the server's workers.

        Raises:
            ConfigError: the server's base_url is https://, and this process has no certificate.
            ServerError: the server refuses, or its workers do not come.
        """
        self._form(client)

    def send(self, packed: Packed) -> None:
        """Send a bucket to every worker; it must stay unchanged until this returns. A slow worker delays no other.

        Raises:
            LinkError: it was not received in time, or the group broke.
        """
        if packed.ready is not None:
            packed.ready.synchronize()
        parts = [part.numpy().data for part in packed.parts]
        others = [in_background(link.send, parts, self._timeout_s) for link in self._links[1:]]
        self._links[0].send(parts, self._timeout_s)
        for other in others:
            other.result()

    @property
    def sent(self) -> int:
        """Bytes that went to this server's workers so far, in all groups, as they were counted on their way out."""
        return self._sent_before + sum(link.sent for link in self._links)

    def aborter(self) -> Callable[[], None]:
        """Return a call that ends this group, here and on the server, and no later one; any thread may make it."""
        return partial(abort_all, tuple(self._links))

    def disconnect(self) -> None:
        """Leave the group. What is under way in it fails, here and on the server."""
        for link in self._links:
            link.close()
        self._sent_before, self._links = self.sent, []

    def close(self) -> None:
        """Leave the group and give the port back."""
        self.disconnect()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _form(self, client: ServerClient, enter: Callable[[], None] | None = None, ranks: Ranks = ranks_alone) -> None:
        """Call the server's workers and take their links, by rank. enter: forms the transport's own group over them."""
        workers = client.world_size()
        certificate = required_certificate(client.base_url, os.environ)
        info = self._group_info(client, workers, ranks, "" if certificate is None else certificate.fingerprint())
        try:
            if self._listener is None:
                context = None if certificate is None else certificate.learner_context(os.environ)
                self._listener = LinkListener(info.master_address, self._port, self._token, context)
            self._listener.expect(info.members(workers))
            init = in_background(client.post, INIT_ROUTE, INIT_PHASE, body={"init_info": asdict(info)})
            self._links = self._wait_for_links(self._listener, info, workers, init)
            if enter is not None:
                enter()
            init.result(timeout=self._timeout_s)
            self.group = info.name
        except (OSError, RuntimeError) as error:
            if self._listener is not None:
                self._listener.expect(())
            if isinstance(error, ServerError):
                raise
            detail = f"transfer group on {info.master_address}:{self._port}: {error}"
            raise ServerError(client.base_url, INIT_PHASE, detail) from error
        logger.info("server %s joined a transfer group with %d workers", client.base_url, workers)

    def _wait_for_links(self, listener: LinkListener, info: GroupInfo, workers: int, init: Future[Any]) -> list[Link]:
        def check() -> None:
            if init.done():
                init.result()  # raises what the call to the server has raised

        try:
            return listener.take(self._timeout_s, check)
        except TimeoutError as error:
            dialled = f"not all of its {workers} workers dialled {info.master_address}:{info.master_port}"
            refused = f"; the last one was refused: {listener.last_refusal}" if listener.last_refusal else ""
            raise TimeoutError(f"{dialled} within {self._timeout_s:g} s{refused}") from error

    def _group_info(self, client: ServerClient, workers: int, ranks: Ranks, certificate: str) -> GroupInfo:
        host, port = host_and_port(client.base_url)
        try:
            address = address_towards(host, port)
        except OSError as error:
            raise ServerError(client.base_url, INIT_PHASE, f"no way to {host}: {error.strerror or error}") from error
        try:
            rank_offset, members = ranks(workers)
        except LinkError as error:
            raise ServerError(client.base_url, INIT_PHASE, str(error)) from error
        return GroupInfo(
            transport=self.transport,
            master_address=address,
            master_port=self._port,
            rank_offset=rank_offset,
            world_size=members,
            packed_buffer_size_bytes=self._bucket_bytes,
            name=new_group_name(),
            timeout_s=SERVER_PATIENCE * self._timeout_s,
            certificate=certificate,
        )


class LinkListener:
    """A listening port, open until it is closed, that admits expected workers only.

    Each connection has a thread of its own while its worker proves itself, so a stranger who is silent or slow delays
    nobody. At most `MAX_HALF_OPEN` wait at once: one more ends the oldest. A worker needs few round trips, so it is the
    oldest only in a flood, and then it dials again.

    context: of TLS; None = without. last_refusal: why the last connection was refused.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, address: str, port: int, token: str, context: ssl.SSLContext | None) -> None:
        self.last_refusal = ""
        self._token = token
        self._context = context
        self._socket = _listen(address, port)
        self._changed = threading.Condition()
        self._expected: frozenset[Member] = frozenset()
        self._links: dict[Member, Link] = {}
        self._half_open: dict[Link, None] = {}  # in the order in which they came
        self._closed = False
        self._thread = threading.Thread(target=self._accept_all, daemon=True, name=f"link-port-{port}")
        self._thread.start()

    def expect(self, members: Collection[Member]) -> None:
        """Admit these members from now on, and no others."""
        with self._changed:
            for link in self._links.values():
                link.close()
            self._expected, self._links, self.last_refusal = frozenset(members), {}, ""

    def take(self, timeout_s: float, check: Callable[[], None]) -> list[Link]:
        """Return the links of all expected members, by rank; `check` raises to end the wait.

        Raises:
            TimeoutError: some did not come.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._links) < len(self._expected):
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError
                self._changed.wait(CHECK_INTERVAL_S)
            links = sorted(self._links.items(), key=lambda item: item[0].rank)
            self._expected, self._links = frozenset(), {}
            return [link for _, link in links]

    def close(self) -> None:
        """Give the port back, and end links that nobody has taken."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept() of the thread
        self._thread.join()
        self._socket.close()
        with self._changed:
            half_open = list(self._half_open)
        for link in half_open:
            link.abort()
        self.expect(())

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                time.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                if self._context is not None:
                    accepted = self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
                link = Link(accepted)
            except OSError:  # it has gone already
                accepted.close()
                continue
            self._make_room_for(link)
            threading.Thread(target=self._admit, args=(link,), daemon=True, name="link-admission").start()

    def _make_room_for(self, link: Link) -> None:
        with self._changed:
            self._half_open[link] = None
            if len(self._half_open) > MAX_HALF_OPEN:
                oldest = next(iter(self._half_open))
                del self._half_open[oldest]
                oldest.abort()

    def _expects(self, member: Member) -> bool:
        return member in self._expected and member not in self._links

    def _admit(self, link: Link) -> None:
        try:
            member = link.admit(self._token, self._expects, ADMISSION_TIMEOUT_S)
        except LinkError as error:
            self.last_refusal = str(error)
            link.close()
            return
        finally:
            with self._changed:
                self._half_open.pop(link, None)
        with self._changed:
            if self._expects(member):
                self._links[member] = link
                self._changed.notify_all()
                return
        link.close()


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
