"""Checks that need a CUDA device: `make test-gpu`. Elsewhere each of them is skipped.

With STAGE2_REHEARSE=1 those that a CPU can run do run there.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.unit.trainer.conftest import chats, encoder, image_paths, model_path, processor

__all__ = ["chats", "encoder", "image_paths", "model_path", "processor"]

HERE = Path(__file__).parent
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
REHEARSED = os.environ.get("STAGE2_REHEARSE") == "1"
ON_GPU_ALONE = pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU has nothing of the kind")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests, and skip them where there is no GPU."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if DEVICE.type == "cpu" and not REHEARSED:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
