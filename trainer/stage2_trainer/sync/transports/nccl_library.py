"""NCCL itself, by vLLM's wrapper of the library that it loads."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from vllm.distributed.device_communicators.pynccl_wrapper import (
    NCCLLibrary,
    buffer_type,
    cudaStream_t,
    ncclComm_t,
    ncclDataTypeEnum,
)

from stage2_trainer.sync.transports.nccl_group import UNIQUE_ID_BYTES
from stage2_trainer.sync.transports.transfer_group import LEARNER_RANK


class NcclCommunicator:
    """A communicator of this process's GPU, with a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._library = NCCLLibrary()
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)
        self._rank = LEARNER_RANK
        self._communicator: ncclComm_t | None = None
        self._aborted = False

    def new_unique_id(self) -> bytes:
        unique_id = self._library.ncclGetUniqueId()
        return ctypes.string_at(ctypes.addressof(unique_id), UNIQUE_ID_BYTES)

    def open(self, unique_id: bytes, rank: int, world_size: int) -> None:
        with torch.cuda.device(self._device):
            self._rank = rank
            shared = self._library.unique_id_from_bytes(unique_id)
            self._communicator = self._library.ncclCommInitRank(world_size, shared, rank)
            if self._aborted:  # while it was formed; NCCL names the group only now
                self.abort()

    def broadcast(self, buffer: torch.Tensor, ready: Any) -> None:
        if self._communicator is None:
            raise RuntimeError("the group was left")
        with torch.cuda.device(self._device):
            if ready is not None:
                self._stream.wait_event(ready)
            place = buffer_type(buffer.data_ptr())
            self._library.ncclBroadcast(
                place if self._rank == LEARNER_RANK else buffer_type(),
                place,
                buffer.numel(),
                ncclDataTypeEnum.from_torch(buffer.dtype),
                LEARNER_RANK,
                self._communicator,
                cudaStream_t(self._stream.cuda_stream),
            )
            self._stream.synchronize()

    def abort(self) -> None:
        self._aborted = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with torch.cuda.device(self._device):
                self._library.ncclCommAbort(communicator)
