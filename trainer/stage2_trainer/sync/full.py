"""Full sync: the learner's merged weights, streamed in buckets to every server at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from stage2_api.runconfig import ServerAddress
from stage2_trainer.server.client import ServerClient
from stage2_trainer.server.errors import ServerError, join_errors
from stage2_trainer.sync.background import in_background
from stage2_trainer.sync.buckets import (
    DEFAULT_BUCKET_BYTES,
    TensorMeta,
    bucket_bytes,
    pack,
    plan_buckets,
    to_wire,
)
from stage2_trainer.sync.peer import Peer
from stage2_trainer.sync.report import SyncReport
from stage2_trainer.sync.transfer import Pending, link_for
from stage2_trainer.sync.weights import WeightSource, merged_weights

POLL_INTERVAL_S = 0.0005


class FullSync:
    """Pushes all weights of a model to every server.

    servers: where they are, and the learner-side port of each one's transfer group.
    timeout_s: seconds that a call, forming a group, or sending one bucket may take.
    device: where buckets are packed; CUDA sends over NCCL, anything else over gloo.
    wire_dtype: what floating-point tensors are cast to (default: each its own).
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        *,
        token: str,
        timeout_s: float,
        device: torch.device,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._wire_dtype = wire_dtype
        self._peers = [
            Peer(
                ServerClient(address.base_url, token, timeout_s=timeout_s),
                link_for(device, address.group_port, bucket_bytes=bucket_bytes, timeout_s=timeout_s),
            )
            for address in servers
        ]

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give every server the model's merged weights, under `version`.

        Raises:
            ServerError: one or more servers do not hold the version. The others do. The next call tries again.
        """
        start = time.monotonic()
        source = merged_weights(model, dtype=self._wire_dtype)
        metas = source.metadata()
        round_ = _Round(self._peers)
        round_.each(Peer.begin)
        try:
            self._push(source, metas, round_)
        except BaseException:
            for peer in round_.fit:
                peer.lose()  # or they would wait for the rest until their deadline
            raise
        round_.each(Peer.finish, version, source.trains_vision)
        round_.raise_failures()
        return SyncReport(
            version=version,
            seconds=time.monotonic() - start,
            bytes=bucket_bytes(metas),
            tensors=len(metas),
            servers=tuple(peer.client.base_url for peer in self._peers),
        )

    def close(self) -> None:
        """Leave all groups."""
        for peer in self._peers:
            peer.close()

    def _push(self, source: WeightSource, metas: list[TensorMeta], round_: _Round) -> None:
        """Send every bucket to all servers at once, packing the next one while one is on its way."""
        plan = list(plan_buckets(metas, self._bucket_bytes))
        update_info, timeout_s = to_wire(metas), self._timeout_s * (len(plan) + 1)
        calls = {peer: peer.receive(update_info, timeout_s) for peer in round_.fit}
        tensors = iter(source)
        flying: dict[Peer, Pending] = {}
        sent: list[TensorMeta] = []
        for bucket in plan:
            buffer = pack(bucket, tensors, self._device)
            self._land(flying, calls, sent, round_)
            flying, sent = {peer: peer.link.broadcast(buffer) for peer in round_.fit}, bucket
        self._land(flying, calls, sent, round_)
        for peer in round_.fit:
            round_.guard(peer, _confirm, peer, calls[peer], self._timeout_s)

    def _land(
        self, flying: dict[Peer, Pending], calls: dict[Peer, Future[Any]], bucket: list[TensorMeta], round_: _Round
    ) -> None:
        """Wait until a bucket has reached every fit server; one that fails or is late is given up."""
        deadline = time.monotonic() + self._timeout_s
        for peer, pending in flying.items():
            round_.guard(peer, _wait, peer, pending, calls[peer], bucket, deadline)


class _Round:
    """The servers of one sync that have not failed yet, and the failures of the others."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.fit = list(peers)
        self._failures: list[ServerError] = []

    def guard(self, peer: Peer, step: Callable[..., Any], *arguments: Any) -> None:
        """Run a step of one server; if it fails, give the server up for this round."""
        try:
            step(*arguments)
        except ServerError as error:
            self._failures.append(error)
            self.fit = [other for other in self.fit if other is not peer]
            peer.lose()

    def each(self, step: Callable[..., Any], *arguments: Any) -> None:
        """Run a step on every fit server, all at once."""
        running = {peer: in_background(step, peer, *arguments) for peer in self.fit}
        for peer, future in running.items():
            self.guard(peer, future.result)

    def raise_failures(self) -> None:
        """Raise what has failed, as one error."""
        if self._failures:
            raise join_errors(self._failures)


def _confirm(peer: Peer, call: Future[Any], timeout_s: float) -> None:
    """Wait until the server says that it has taken everything."""
    try:
        call.result(timeout=timeout_s)
    except TimeoutError as error:
        detail = f"all tensors sent, but not confirmed within {timeout_s:g} s"
        raise ServerError(peer.client.base_url, "push", detail) from error


def _wait(peer: Peer, pending: Pending, call: Future[Any], bucket: list[TensorMeta], deadline: float) -> None:
    """Wait for one broadcast. The server's own answer comes first: it says more than a broken connection."""
    what = f"tensors {bucket[0].name} to {bucket[-1].name}"
    try:
        while not pending.done():
            if call.done():
                call.result()
            if time.monotonic() > deadline:
                raise ServerError(peer.client.base_url, "push", f"{what} not taken in time")
            time.sleep(POLL_INTERVAL_S)
    except ServerError:
        raise
    except RuntimeError as error:
        raise ServerError(peer.client.base_url, "push", f"{what}: {error}") from error
