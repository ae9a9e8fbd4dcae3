"""vLLM weight-transfer engines: they receive the learner's tensors, over TCP or NCCL, and load them into the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
from vllm.logger import init_logger

from stage2_trainer.sync.tensors.announcement import from_wire
from stage2_trainer.sync.transports.link import GroupInfo
from stage2_trainer.sync.transports.receiver import Receiver
from stage2_trainer.sync.vllm.adapter_store import keep_adapter
from stage2_trainer.sync.vllm.server_merge import ServerMerge
from stage2_trainer.sync.vllm.vllm_compat import TRANSFER_BACKENDS, LayerReload, receive_and_settle

logger = init_logger("vllm.stage2")  # vLLM's processes print no others


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """The tensors that follow, in order.

    group: the name of the group that carries them. number: of this call in it (`Receiver.accept`). adapter: name and
    config of the adapter that they form; None = base weights. merge: the recipe by which this server merges them
    (`tensors.announcement`); None = they are whole.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group: str
    number: int
    adapter: dict[str, Any] | None = None
    merge: dict[str, Any] | None = None


class ReceivingEngine(WeightTransferEngine[Any, BucketUpdateInfo]):
    """An engine that takes the learner's buckets and loads what arrives into the running model.

    The name of its backend says what it receives over (`TRANSFER_BACKENDS`).
    """

    init_info_cls = GroupInfo
    update_info_cls = BucketUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver = Receiver("tcp" if config.backend == TRANSFER_BACKENDS["tcp"] else "nccl", device)
        self._merge = ServerMerge(vllm_config.model_config.model, device)
        self._reload = LayerReload(model, vllm_config.model_config)

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the learner's group as the rank that this worker has in it."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver.join(init_info, init_info.rank_offset + worker)

    def start_weight_update(self) -> None:
        """Leave the layers alone until base weights come: an adapter does not touch them."""
        self._reload.abandon()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load tensors. If that fails, put old weights back: without them a request ends the engine."""
        try:
            receive_and_settle(self, update_info)
        except BaseException:
            self._reload.abandon()
            raise

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Load each bucket of base weights while the next one arrives; keep an adapter for vLLM's adapter loader."""
        self._receiver.accept(update_info.group, update_info.number)
        metas = from_wire(update_info.names, update_info.dtype_names, update_info.shapes)
        if update_info.adapter is not None:
            tensors: dict[str, torch.Tensor] = {}
            self._receiver.receive(metas, tensors.update, group=update_info.group)
            keep_adapter(update_info.adapter["name"], update_info.adapter["config"], tensors)
            return
        receive = partial(self._receiver.receive, metas, group=update_info.group)
        if update_info.merge is not None:
            self._merge.update(update_info.merge, receive, self._reload.load)
            if "expected" in update_info.merge:  # all has come
                self._reload.require_whole()
            return
        receive(self._reload.load)

    def finish_weight_update(self) -> None:
        """Put new base weights in the places of the old ones, if any came."""
        loaded, kept = self._reload.finish()
        if loaded and self.parallel_config.rank == 0:
            logger.info("%d layers have new weights, and %d keep theirs", loaded, kept)

    def shutdown(self) -> None:
        """Leave the group."""
        self._receiver.leave_group()
