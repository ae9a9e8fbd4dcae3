"""The rollout servers of a run: a session for each, which knows what its server holds, and the updates of all.

A server that fails in a push is given up for that push only: the others continue, and the next push sends it
everything.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from stage2_api.errors import ConfigError, Problem
from stage2_api.vllm import TRANSPORT_PATH, ServerAddress, SyncTransport, resolve_transport
from stage2_trainer.process.background import in_background
from stage2_trainer.sync.fleet.delivery import Delivery, Packer
from stage2_trainer.sync.fleet.merge_location import MergeLocation
from stage2_trainer.sync.fleet.report import PHASES, SyncReport
from stage2_trainer.sync.tensors.merge import Held, WeightSource
from stage2_trainer.sync.transports.nccl import NcclTransfer
from stage2_trainer.sync.transports.nccl_group import NcclCommunicator, OneGroup
from stage2_trainer.sync.transports.transfer import WeightTransfer
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError, join_errors
from stage2_trainer.wire.requests import RolloutRequest, Sampling
from stage2_trainer.wire.update_routes import (
    FINISH_ROUTE,
    PAUSE_ROUTE,
    RESET_AFTER_VISION,
    RESET_PREFIX_CACHE,
    RESUME_ROUTE,
    START_ROUTE,
    UPDATE_ROUTE,
)

logger = logging.getLogger(__name__)

FRESH = "default"  # the version of a server that was never given weights
UNFINISHED = "unfinished"  # the version of a server that may hold a part of an update
START, DIGEST_PHASE, RESET, CONFIRM = "start", "compare digests", "reset caches", "confirm"
RESET_INTERVAL_S = 0.02


def close_update(client: ServerClient) -> None:
    """Close the update that a dead learner may have left open, because some layers may have no weights until then.

    The server's version is `UNFINISHED` afterwards, since it may hold a part of that update.

    Raises:
        ServerError: the server does not answer.
    """
    try:
        client.post(FINISH_ROUTE, START)
    except ServerError as error:  # none is open, because the server has ended it
        if error.status is None:
            raise
    client.post("/update_weight_version", START, body={"new_version": UNFINISHED})


class ServerSession:
    """One server: its transfer group, the calls of an update in their order, and what the server holds after it.

    held: the tensors of full pushes that it holds.
    holds_base: whether its served weights are those of its model folder.
    proven_base: digests of the learner's base weights that its model folder has; None = not compared yet.
    connected: whether a group was formed, and not given up since.
    """

    def __init__(self, client: ServerClient, transfer: WeightTransfer) -> None:
        self.client = client
        self.transfer = transfer
        self.held: Held = {}
        self.holds_base = False
        self.proven_base: Mapping[str, str] | None = None
        self.connected = False
        self._calls = itertools.count(1)
        self._version: int | None = None
        self._adapters: set[str] | None = None  # that it serves; None = unknown: an earlier learner may have left some

    def connect(self) -> None:
        """Form the group."""
        self.transfer.connect(self.client)
        self.connected = True

    def begin(self) -> None:
        """Stop generation, and open an update; if the server has lost its weights, form a new group first."""
        if not self._open():
            logger.warning("server %s lost version %s: it was restarted", self.client.base_url, self._version)
            self.lose()
            self.connect()
            self._open()

    def _open(self) -> bool:
        """Open an update, unless the server reports an unexpected version; returns whether it is open."""
        version = self.client.weight_version()
        if self._version is None:
            self.holds_base = version == FRESH
        elif version != str(self._version):
            return False
        self.client.post(f"{PAUSE_ROUTE}?mode=abort&clear_cache=false", "pause")
        try:
            self.client.post(START_ROUTE, START)
        except ServerError as error:
            # A learner that died between start and finish leaves its update open; close it, and open ours.
            logger.warning("%s; closing the update that an earlier learner left open", error)
            close_update(self.client)
            self.client.post(START_ROUTE, START)
            self.holds_base = False
        return True

    def compare_folder(self, location: MergeLocation, weights: WeightSource) -> None:
        """Compare the server's model folder with the learner's base weights. Raises as `MergeLocation`'s."""
        self.proven_base = location.compare_folder(self.client, weights)

    def deliver(self, announcement: str, timeout_s: float) -> Delivery:
        """Announce tensors to the server, which receives them from then on; returns what they are sent by.

        If the server's call fails, the group ends. announcement: JSON text. timeout_s: for all of it.
        """
        call = in_background(self._call_update, self._in_this_group(announcement), timeout_s, self.transfer.aborter())
        return Delivery(self.client.base_url, self.transfer, call)

    def finish_full(self, version: int, held: Held, *, vision_moved: bool, expected: str | None) -> None:
        """Finish a full push: the server now holds `held`, not its base, and serves no adapter. Raises as `finish`."""
        self.finish(version, vision_moved=vision_moved, expected=expected)
        self.holds_base = False
        self.drop_adapters()
        self.held = held

    def finish_adapter(self, version: int, name: str) -> None:
        """Finish the push of an adapter: the server now holds its base, and serves this adapter. Raises as `finish`."""
        self.finish(version, vision_moved=not self.holds_base)
        self.holds_base = True
        self.use_adapter(name)

    def finish(self, version: int, *, vision_moved: bool, expected: str | None = None) -> None:
        """Close the update under its version, drop what was cached from older weights, and resume generation.

        expected: the digests that the server must have loaded (`digest_request`); None = they are not compared.

        Raises:
            ServerError: the server does not hold the version, or has loaded other weights.
        """
        if expected is not None:
            self.client.post(UPDATE_ROUTE, DIGEST_PHASE, body=self._in_this_group(expected))
        self.client.post(FINISH_ROUTE, "finish", body={"weight_version": str(version)})
        self._reset_prefix_cache()
        for route in RESET_AFTER_VISION if vision_moved else ():
            self.client.post(route, RESET)
        self.client.post(RESUME_ROUTE, "resume")
        found = self.client.weight_version()
        if found != str(version):
            raise ServerError(self.client.base_url, CONFIRM, f"reports weight version {found!r} instead of {version}")
        self._version = version

    def _reset_prefix_cache(self) -> None:
        """Reset the prefix cache, again and again until it succeeds.

        vLLM keeps the attention cache of older weights while an aborted request still holds it.
        """
        deadline: float | None = None
        while self.client.post(RESET_PREFIX_CACHE, RESET).get("success") is not True:
            deadline = deadline or time.monotonic() + self.client.timeout_s  # from the first failure
            if time.monotonic() > deadline:
                detail = (
                    f"POST {RESET_PREFIX_CACHE} did not succeed within {self.client.timeout_s:g} s: requests of another"
                    " client hold the cache, and answers would come from older weights; let nobody else use this server"
                )
                raise ServerError(self.client.base_url, RESET, detail)
            time.sleep(RESET_INTERVAL_S)

    def use_adapter(self, name: str) -> None:
        """Make the server load the adapter that it was sent, by asking it for one token, and drop all others."""
        if self._adapters is not None:
            self._adapters.add(name)
        request = RolloutRequest(messages=[{"role": "user", "content": "."}], adapter=name)
        self.client.post(CHAT_ROUTE, "load adapter", body=chat_body(request, Sampling(max_new_tokens=1), seed=0))
        self.drop_adapters(keep=name)

    def drop_adapters(self, *, keep: str | None = None) -> None:
        """Make the server forget every adapter but one; an earlier learner may have left some."""
        found = self.client.adapters() if self._adapters is None else sorted(self._adapters)
        for name in found:
            if name != keep:
                self.client.unload_adapter(name)
        self._adapters = set() if keep is None else {keep}

    def _in_this_group(self, update_info: str) -> str:
        carrier = f'"group": {json.dumps(self.transfer.group)}, "number": {next(self._calls)}'
        return f'{{"update_info": {{{carrier}, {update_info[1:]}}}'

    def _call_update(self, body: str, timeout_s: float, abort: Callable[[], None]) -> None:
        try:
            self.client.post(UPDATE_ROUTE, "push", body=body, timeout_s=timeout_s)
        except BaseException:
            abort()  # the group of this update: there may be a newer one by now
            raise

    def lose(self) -> None:
        """Give the group up: the next update forms a new one, and trusts nothing that the server holds."""
        self.transfer.disconnect()
        self.held = {}
        self.holds_base = False
        self.proven_base = None
        self.connected = False
        self._version = None
        self._adapters = None


class Update:
    """One push: the servers that have not failed yet (`fit`), the failures of the others, and where the time goes.

    sent_before: bytes that had gone to all servers before it. phase_seconds: of each phase, on the learner's clock.
    connect: forming groups. begin: stopping generation and opening the update. pack: merging and packing. send: waiting
    for bytes to go out. load: digesting what servers merge, and waiting for them to load. finish: closing the update.
    prove: comparing log-probabilities.
    """

    def __init__(self, sessions: Sequence[ServerSession], sent_before: int = 0) -> None:
        self.fit = list(sessions)
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.start = time.monotonic()
        self.sent_before = sent_before
        self._failures: list[ServerError] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phase_seconds[phase] += time.monotonic() - start

    def each(
        self, step: Callable[..., Any], *arguments: Any, only: Callable[[ServerSession], bool] | None = None
    ) -> None:
        """Run a step for every fit server (or for those that `only` selects), all at once."""
        chosen = [session for session in self.fit if only is None or only(session)]
        running = {session: in_background(step, session, *arguments) for session in chosen}
        for session, future in running.items():
            self.guard(session, future.result)

    def guard(self, session: ServerSession, step: Callable[..., Any], *arguments: Any) -> None:
        """Run a step of one server; if it fails, give the server up for this push."""
        try:
            step(*arguments)
        except ServerError as error:
            self._failures.append(error)
            self.fit = [other for other in self.fit if other is not session]
            session.lose()

    def raise_failures(self) -> None:
        """Raise all failures, as one error."""
        if self._failures:
            raise join_errors(self._failures)


def transfer_for(
    device: torch.device,
    group_port: int,
    *,
    requested: SyncTransport,
    token: str,
    bucket_bytes: int,
    timeout_s: float,
    shared: tuple[OneGroup, int] | None = None,
) -> WeightTransfer:
    """Return the transfer to one server, whose workers dial `group_port` of the learner.

    device: where the weights are. shared: the server's seat in a group of all servers, for NCCL.

    Raises:
        ConfigError: NCCL is configured, and the weights are not on a GPU.
    """
    on_cuda = device.type == "cuda"
    transport = resolve_transport(requested, on_cuda=on_cuda)
    if transport == "nccl" and not on_cuda:
        rule, way_out = "NCCL needs a learner on a GPU", "set it to tcp, or leave it out"
        raise ConfigError((Problem(TRANSPORT_PATH, requested, rule, way_out),))
    options: dict[str, Any] = {"token": token, "bucket_bytes": bucket_bytes, "timeout_s": timeout_s}
    if transport == "tcp":
        return WeightTransfer(group_port, **options)
    return NcclTransfer(group_port, device, shared=shared, **options)


def one_group_for(device: torch.device, servers: int, *, requested: SyncTransport, timeout_s: float) -> OneGroup | None:
    """Return the group that so many servers share if weights travel over NCCL; None otherwise."""
    if resolve_transport(requested, on_cuda=device.type == "cuda") == "tcp":
        return None
    return OneGroup(servers, communicator=partial(NcclCommunicator, device), timeout_s=timeout_s)


class Fleet:
    """The servers of a run, and a transfer group for each.

    servers: where they are, and the learner-side port of each one's transfer group.
    timeout_s: seconds that a call, forming a group, or sending one bucket may take.
    device: the one that weights are on. transport: see `VllmSync.transport`. one_group: whether servers share a group
    over NCCL, for as long as all of them hold; then all are always sent the same.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        *,
        token: str,
        timeout_s: float,
        device: torch.device,
        bucket_bytes: int,
        transport: SyncTransport = "auto",
        one_group: bool = False,
    ) -> None:
        shared = one_group_for(device, len(servers), requested=transport, timeout_s=timeout_s) if one_group else None
        self._shared = shared
        self._token = token
        self.timeout_s = timeout_s
        self.bucket_bytes = bucket_bytes
        self._transfer_for = partial(
            transfer_for, device, requested=transport, token=token, bucket_bytes=bucket_bytes, timeout_s=timeout_s
        )
        self._servers = tuple(servers)
        self.sessions = [self._session(address, seat) for seat, address in enumerate(servers)]
        self.packer = Packer(device, self.sessions[0].transfer.staging)

    def _session(self, address: ServerAddress, seat: int | None = None) -> ServerSession:
        shared = None if self._shared is None or seat is None else (self._shared, seat)
        client = ServerClient(address.base_url, self._token, timeout_s=self.timeout_s)
        return ServerSession(client, self._transfer_for(address.group_port, shared=shared))

    def set_servers(self, servers: Sequence[ServerAddress]) -> None:
        """Set the servers that pushes go to from now on. A new one gets everything; a group of all servers ends."""
        if tuple(servers) == self._servers:
            return
        if self._shared is not None:
            self._shared.end()
            self.leave_ended_group()
        known = dict(zip(self._servers, self.sessions, strict=True))
        for address in known.keys() - set(servers):
            known[address].transfer.close()
        self._servers = tuple(servers)
        self.sessions = [known.get(address) or self._session(address) for address in servers]

    @property
    def carrier(self) -> str:
        """The transport of the weights."""
        return self.sessions[0].transfer.transport

    @property
    def sent(self) -> int:
        """Bytes that went to all servers so far, as they were counted on their way out."""
        return sum(session.transfer.sent for session in self.sessions)

    @contextmanager
    def update(self) -> Iterator[Update]:
        """Yield one push's update of all servers, whose steps the block takes (`push.reach` is the first).

        An error of our own in the block gives every server up: they would wait for the rest until their deadline.

        Raises:
            ServerError: at the end, one or more servers failed. The others went through.
        """
        update = Update(self.sessions, self.sent)
        try:
            yield update
        except BaseException:
            for session in update.fit:
                session.lose()
            raise
        update.raise_failures()

    def report(self, update: Update, version: int, **fields: Any) -> SyncReport:
        """Return the report of a push that brought all servers to a version. fields: other fields of the report."""
        return SyncReport.create(
            version,
            time.monotonic() - update.start,
            [session.client.base_url for session in self.sessions],
            wire_bytes=self.sent - update.sent_before,
            phase_seconds=update.phase_seconds,
            transport=self.carrier,
            **fields,
        )

    def leave_ended_group(self) -> bool:
        """Leave the group of all servers if it has ended, and return whether it had: each server then gets its own.

        What the servers hold is forgotten with it.
        """
        if self._shared is None or not self._shared.ended:
            return False
        self._shared = None
        for session in self.sessions:
            session.lose()
        return True

    def close(self) -> None:
        """Leave all groups."""
        for session in self.sessions:
            session.transfer.close()
