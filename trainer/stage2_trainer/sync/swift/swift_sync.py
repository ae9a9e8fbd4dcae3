"""Full pushes to servers that `swift rollout` started (semantics, section 11).

There the server listens on the group port, the learner has the highest rank, and each bucket is announced by a call of
its own, which the server answers before it has the bytes; what goes wrong there shows only as a broadcast that does not
end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from stage2_api.vllm import ServerAddress, SyncRounding
from stage2_trainer.process.background import in_background
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.sync.swift.swift_groups import GlooSwiftGroup, NcclSwiftGroup, SwiftGroup
from stage2_trainer.sync.tensors.announcement import TensorMeta, bucket_bytes, pack, plan_buckets
from stage2_trainer.sync.tensors.merge import HERE, WeightAccess, merged_weights
from stage2_trainer.sync.tensors.merge_math import rounding_for
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.credentials import host_and_port
from stage2_trainer.wire.errors import ServerError, join_errors

ANY_ADDRESS = "0.0.0.0"
TAKES_MERGED = "servers of `swift rollout` take merged weights alone (vllm.server.protocol)"
CACHES = ("/reset_prefix_cache/", "/reset_mm_cache/", "/reset_encoder_cache/")


class SwiftPush:
    """Pushes all weights of a model to every server, bucket by bucket, to all servers at once."""

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        *,
        token: str,
        timeout_s: float,
        device: torch.device,
        rounding: SyncRounding = "nearest",
        access: WeightAccess = HERE,
    ) -> None:
        self._servers = [
            _SwiftServer(ServerClient(address.base_url, token, timeout_s=timeout_s), address.group_port, device)
            for address in servers
        ]
        self._device = device
        self._rounding = rounding
        self._access = access

    def planned(self) -> SyncReport:
        """Return what is known before the first push."""
        return SyncReport(merge="learner", merge_reason=TAKES_MERGED)

    def push(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give every server the model's merged weights.

        Raises:
            ServerError: one or more servers did not take them all.
        """
        start = time.monotonic()
        rounding = rounding_for(self._rounding, version)
        source = merged_weights(model, rounding=rounding, access=self._access)
        metas = source.metadata()
        self._each("join")
        tensors = iter(source)
        plan = list(plan_buckets(metas, self._access.bucket_bytes))
        memory = torch.empty(max(map(bucket_bytes, plan), default=0), dtype=torch.uint8, device=self._device)
        for bucket in plan:
            self._each("take", bucket, pack(bucket, tensors, memory))
        self._each("finish")
        return SyncReport.create(
            version,
            time.monotonic() - start,
            [server.client.base_url for server in self._servers],
            bytes=bucket_bytes(metas),
            tensors=len(metas),
            merge="learner",
            merge_reason=TAKES_MERGED,
            rounding_kept=source.rounding_kept(),
        )

    def close(self) -> None:
        """Leave all groups."""
        for server in self._servers:
            server.close()

    def _each(self, step: str, *arguments: Any) -> None:
        running = [in_background(getattr(server, step), *arguments) for server in self._servers]
        failures = []
        for server, future in zip(self._servers, running, strict=True):
            try:
                future.result()
            except ServerError as error:
                failures.append(error)
                server.lose()
        if failures:
            raise join_errors(failures)


class _SwiftServer:
    """One server's part in a push."""

    def __init__(self, client: ServerClient, port: int, device: torch.device) -> None:
        self.client = client
        self._port = port
        self._device = device
        self._group: SwiftGroup | None = None

    def join(self) -> None:
        if self._group is not None:
            return
        workers = int(self.client.get("/get_world_size/", "connect")["world_size"])
        body = {"host": ANY_ADDRESS, "port": self._port, "world_size": workers + 1}
        self.client.post("/init_communicator/", "connect", body=body)
        host, _ = host_and_port(self.client.base_url)
        try:
            group = NcclSwiftGroup if self._device.type == "cuda" else GlooSwiftGroup
            self._group = group(host, self._port, workers, workers + 1, self.client.timeout_s)
        except (OSError, RuntimeError) as error:
            detail = f"transfer group on {host}:{self._port}: {error}"
            raise ServerError(self.client.base_url, "connect", detail) from error

    def take(self, bucket: list[TensorMeta], buffer: torch.Tensor) -> None:
        assert self._group is not None
        self.client.post("/update_flattened_params/", "push", body={"metadatas": _metadatas(bucket)})
        try:
            self._group.send(buffer, self.client.timeout_s)
        except RuntimeError as error:
            detail = f"tensors {bucket[0].name} to {bucket[-1].name}: {error}"
            raise ServerError(self.client.base_url, "push", detail) from error

    def finish(self) -> None:
        self.client.post("/process_weights_after_loading/", "finish")
        for route in CACHES:
            self.client.post(route, "reset caches")

    def lose(self) -> None:
        """Give the group up; the server must give it up too before the next one can be formed."""
        self._group = None
        in_background(self.client.post, "/close_communicator/", "close")

    def close(self) -> None:
        if self._group is not None:
            self._group = None
            self.client.post("/close_communicator/", "close")


def _metadatas(bucket: Sequence[TensorMeta]) -> list[dict[str, Any]]:
    """Return a bucket as ms-swift's FlattenedTensorMetadata: byte ranges in one uint8 tensor."""
    ends = accumulate(meta.nbytes for meta in bucket)
    return [
        {
            "name": meta.name,
            "shape": list(meta.shape),
            "dtype": str(meta.dtype),
            "start_idx": end - meta.nbytes,
            "end_idx": end,
            "numel": meta.nbytes // meta.dtype.itemsize,
        }
        for meta, end in zip(bucket, ends, strict=True)
    ]
