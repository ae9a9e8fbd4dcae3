"""vLLM's nccl weight-transfer engine, taught to take adapters too: for GPU servers with `enable_lora`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

from stage2_trainer.engine.adapter_store import keep_adapter


@dataclass
class AdapterUpdateInfo(NCCLWeightTransferUpdateInfo):
    """The tensors that follow, in order; `adapter` (name, config) says that they are an adapter's."""

    adapter: dict[str, Any] | None = None


class AdapterNcclEngine(NCCLWeightTransferEngine):
    """An engine that loads base weights as vLLM does, and keeps adapters for vLLM's adapter loader."""

    update_info_cls = AdapterUpdateInfo
    _loading = False

    def start_weight_update(self) -> None:
        """Leave the layers alone until base weights come: an adapter does not touch them."""

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive base weights into the model, or an adapter into its folder."""
        assert isinstance(update_info, AdapterUpdateInfo)  # `update_info_cls`
        if update_info.adapter is None:
            if not self._loading:
                super().start_weight_update()
                self._loading = True
            super().receive_weights(update_info)
            return
        shapes = zip(update_info.shapes, (getattr(torch, name) for name in update_info.dtype_names), strict=True)
        tensors: dict[str, torch.Tensor] = {}
        packed_nccl_broadcast_consumer(
            iterator=zip(update_info.names, shapes, strict=True),
            group=self.model_update_group,
            src=0,
            post_unpack_func=lambda pairs: tensors.update({name: tensor.cpu() for name, tensor in pairs}),
            buffer_size_bytes=self.packed_buffer_size_bytes,
            num_buffers=self.packed_num_buffers,
            device=self.device,
        )
        keep_adapter(update_info.adapter["name"], update_info.adapter["config"], tensors)

    def finish_weight_update(self) -> None:
        """Put new base weights in place, if any came."""
        if self._loading:
            super().finish_weight_update()
            self._loading = False
