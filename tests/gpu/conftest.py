"""Checks that need a CUDA device: `make test-gpu`. Elsewhere each of them is skipped."""

from pathlib import Path

import pytest
import torch

from tests.unit.trainer.conftest import chats, encoder, image_paths, model_path, processor

__all__ = ["chats", "encoder", "image_paths", "model_path", "processor"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests, and skip them where there is no GPU."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
