"""The stub's weight updates: it checks the order of their calls, and loads the tensors that arrive in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from stage2_trainer.serve.stub.model import AdapterInfo, StubModel
from stage2_trainer.sync.transports.protocol import GroupInfo, from_wire
from stage2_trainer.sync.transports.receiver import Load, Receiver
from stage2_trainer.sync.vllm.server_merge import ServerMerge


class UpdateInfo(BaseModel):
    """The tensors that follow, in order: base weights, an adapter's, or the parts that a recipe needs (`merge`).

    group: the name of the group that carries them.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group: str
    adapter: AdapterInfo | None = None
    merge: dict[str, Any] | None = None


class WeightUpdates:
    """Updates of a model's weights.

    root: its folder. max_lora_rank: the largest rank of an adapter that it accepts; None = it accepts no adapter.
    """

    def __init__(self, model: StubModel, root: str, receiver: Receiver, *, max_lora_rank: int | None) -> None:
        self.receiver = receiver
        self._model = model
        self._merge = ServerMerge(root, torch.device("cpu"))
        self._max_lora_rank = max_lora_rank
        self.version = "default"
        self._open: object | None = None  # the update under way

    def start(self) -> None:
        """Open an update. Raises RuntimeError if one is open."""
        if self._open is not None:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._open = object()

    def update(self, info: UpdateInfo) -> None:
        """Receive and load tensors."""
        mine = self._open
        if mine is None:
            raise RuntimeError("start_weight_update must be called before update_weights")
        metas = from_wire(info.names, info.dtype_names, info.shapes)
        receive = partial(self.receiver.receive, metas, group=info.group)
        self.receiver.require(info.group)  # an earlier learner's call closes nothing of this one's
        try:
            if info.adapter is not None:
                self._receive_adapter(receive, info.adapter)
            elif info.merge is not None:
                self._merge.update(info.merge, receive, self._model.load_weights)
            else:
                receive(self._model.load_weights)
        except BaseException:
            if self._open is mine:  # and not one that another learner has opened meanwhile
                self._open = None
            raise

    def _receive_adapter(self, receive: Callable[[Load], None], adapter: AdapterInfo) -> None:
        tensors: dict[str, Tensor] = {}
        receive(tensors.update)
        if self._max_lora_rank is None:
            raise RuntimeError("this server was started without --enable-lora")
        if (rank := adapter.config["r"]) > self._max_lora_rank:
            raise RuntimeError(f"LoRA rank {rank} is greater than max_lora_rank {self._max_lora_rank}")
        self._model.keep_adapter(adapter, tensors)

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
