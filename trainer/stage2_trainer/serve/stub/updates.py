"""The stub's side of weight updates: the order of their calls, and the tensors that come between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from stage2_trainer.serve.stub.model import AdapterInfo, StubModel
from stage2_trainer.sync.transports.buckets import from_wire
from stage2_trainer.sync.transports.protocol import GroupInfo
from stage2_trainer.sync.transports.receiver import Load, Receiver
from stage2_trainer.sync.vllm.server_merge import ServerMerge


class InitRequest(BaseModel):
    """Body of POST /init_weight_transfer_engine."""

    init_info: dict[str, Any]


class UpdateInfo(BaseModel):
    """The tensors that follow, in order: base weights, those of an adapter, or what a recipe needs (`merge`).

    group: the name of the group that they are sent in.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group: str
    adapter: AdapterInfo | None = None
    merge: dict[str, Any] | None = None


class UpdateRequest(BaseModel):
    """Body of POST /update_weights."""

    update_info: UpdateInfo


class FinishRequest(BaseModel):
    """Body of POST /finish_weight_update."""

    weight_version: str | None = None


INITIAL_VERSION = "default"


class WeightUpdates:
    """Updates of a model's weights. root: its folder. max_lora_rank: of adapters that are taken; None = none are."""

    def __init__(self, model: StubModel, root: str, receiver: Receiver, *, max_lora_rank: int | None) -> None:
        self.model = model
        self.merge = ServerMerge(root, torch.device("cpu"))
        self.max_lora_rank = max_lora_rank
        self.receiver = receiver
        self.version = INITIAL_VERSION
        self._open: object | None = None  # the update under way

    def start(self) -> None:
        """Open an update. Raises RuntimeError if one is open."""
        if self._open is not None:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._open = object()

    def update(self, request: UpdateRequest) -> None:
        """Receive and load tensors."""
        mine = self._open
        if mine is None:
            raise RuntimeError("start_weight_update must be called before update_weights")
        info = request.update_info
        metas = from_wire(info.names, info.dtype_names, info.shapes)
        receive = partial(self.receiver.receive, metas, group=info.group)
        self.receiver.require(info.group)  # an earlier learner's call closes nothing of this one's
        try:
            if info.adapter is not None:
                self._receive_adapter(receive, info.adapter)
            elif info.merge is not None:
                self.merge.update(info.merge, receive, self.model.load_weights)
            else:
                receive(self.model.load_weights)
        except BaseException:
            if self._open is mine:  # and not one that another learner has opened meanwhile
                self._open = None
            raise

    def _receive_adapter(self, receive: Callable[[Load], None], adapter: AdapterInfo) -> None:
        tensors: dict[str, Tensor] = {}
        receive(tensors.update)
        if self.max_lora_rank is None:
            raise RuntimeError("this server was started without --enable-lora")
        if (rank := adapter.config["r"]) > self.max_lora_rank:
            raise RuntimeError(f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}")
        self.model.keep_adapter(adapter, tensors)

    def finish(self, version: str | None) -> None:
        """Close the update, under a version."""
        if self._open is None:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self._open = None
        self.version = version or self.version

    def join(self, init_info: dict[str, Any]) -> None:
        """Enter a learner's transfer group."""
        info = GroupInfo(**init_info)
        self.receiver.join(info, info.rank_offset)
