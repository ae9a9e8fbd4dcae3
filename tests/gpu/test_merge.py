"""A weight that a GPU merges has the bits of one that a CPU merges: learner and server compare them byte for byte."""

import pytest
import torch
from bench.gpu import to_device
from bench.merge import layer

from stage2_trainer.sync.tensors.merge_math import served_weight
from tests.gpu.conftest import DEVICE


@pytest.mark.parametrize("shape", [(64, 96), (1024, 3072), (4096, 4096)])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gpu_merge_is_bitwise_equal_to_cpu_merge(shape, dora, dtype):
    base, adapter = layer(shape, 16, dora=dora)
    base = base.to(dtype)
    there = served_weight("weight", base.to(DEVICE), to_device(adapter, DEVICE), None)
    here = served_weight("weight", base, adapter, None)
    assert torch.equal(there.cpu(), here)
