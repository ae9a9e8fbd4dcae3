"""vLLM's nccl weight-transfer engine, taught to take adapters too, and to merge them into its folder's weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

from stage2_trainer.engine.adapter_store import keep_adapter
from stage2_trainer.engine.gloo_receiver import Load
from stage2_trainer.engine.server_merge import ServerMerge


@dataclass
class AdapterUpdateInfo(NCCLWeightTransferUpdateInfo):
    """The tensors that follow, in order.

    adapter: (name, config) of the adapter that they are. merge: what is to be made of them (`weights.server_recipe`).
    """

    adapter: dict[str, Any] | None = None
    merge: dict[str, Any] | None = None


class AdapterNcclEngine(NCCLWeightTransferEngine):
    """An engine that loads base weights as vLLM does, and keeps adapters for vLLM's adapter loader."""

    update_info_cls = AdapterUpdateInfo
    _loading = False
    _merge: ServerMerge | None = None

    def start_weight_update(self) -> None:
        """Leave the layers alone until base weights come: an adapter does not touch them."""

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive base weights into the model, an adapter into its folder, or what merged weights are made of."""
        assert isinstance(update_info, AdapterUpdateInfo)  # `update_info_cls`
        if update_info.adapter is not None:
            tensors: dict[str, torch.Tensor] = {}
            self._receive(update_info, lambda pairs: tensors.update({name: tensor.cpu() for name, tensor in pairs}))
            keep_adapter(update_info.adapter["name"], update_info.adapter["config"], tensors)
        elif update_info.merge is not None:
            self._merge = self._merge or ServerMerge(self.model_config.model, self.device)
            self._merge.update(update_info.merge, partial(self._receive, update_info), self._load)
        else:
            self._begin_loading()
            super().receive_weights(update_info)

    def _receive(self, update_info: AdapterUpdateInfo, load: Load) -> None:
        if not update_info.names:
            return
        shapes = zip(update_info.shapes, (getattr(torch, name) for name in update_info.dtype_names), strict=True)
        packed_nccl_broadcast_consumer(
            iterator=zip(update_info.names, shapes, strict=True),
            group=self.model_update_group,
            src=0,
            post_unpack_func=load,
            buffer_size_bytes=self.packed_buffer_size_bytes,
            num_buffers=self.packed_num_buffers,
            device=self.device,
        )

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._begin_loading()
        model: Any = self.model
        model.load_weights(tensors)

    def _begin_loading(self) -> None:
        if not self._loading:
            super().start_weight_update()
            self._loading = True

    def finish_weight_update(self) -> None:
        """Put new base weights in place, if any came."""
        if self._loading:
            super().finish_weight_update()
            self._loading = False
