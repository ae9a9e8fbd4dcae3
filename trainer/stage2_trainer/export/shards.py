"""Tensors of a stream as sharded safetensors files: in memory are one shard and at most one tensor larger than that."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.model_folder import INDEX
from stage2_trainer.sync.transports.buckets import TensorMeta

SHARD_BYTES = 2 * 10**9


def write_shards(
    tensors: Iterable[tuple[str, Tensor]], metadata: Sequence[TensorMeta], folder: Path, *, shard_bytes: int
) -> dict[str, str]:
    """Write a stream that yields what its metadata say, in that order; return the digest of each tensor."""
    empty = {one.name: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in metadata}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=shard_bytes)
    digests, held = Digests(), defaultdict[str, dict[str, Tensor]](dict)
    for name, tensor in tensors:
        digests.add(name, tensor)
        file = plan.tensor_to_filename[name]
        held[file][name] = tensor.contiguous()
        if len(held[file]) == len(plan.filename_to_tensors[file]):
            save_file(held.pop(file), folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return digests.of_tensors()
