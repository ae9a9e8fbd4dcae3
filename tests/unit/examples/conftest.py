"""The examples' modules on the import path, and one random tiny model for all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

SEED = 7


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def written_twice(folder: Path, script: str, *options: str) -> Path:
    """A folder that a script has written, as it has a second one."""
    for name in ("a", "b"):
        command = [sys.executable, str(EXAMPLES / script), str(folder / name), *options]
        subprocess.run(command, check=True, capture_output=True)
    assert contents(folder / "a") == contents(folder / "b")
    return folder / "a"


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Two threads wait for each other when something else runs: for work this small that costs more than it gives."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizer():
    from tiny_model.tokenizer import build_tokenizer

    return build_tokenizer(SEED)


@pytest.fixture(scope="session")
def processor(tokenizer):
    from tiny_model.model import build_processor

    return build_processor(tokenizer)


@pytest.fixture
def model(tokenizer):
    from tiny_model.model import build_model

    return build_model(tokenizer, SEED)


@pytest.fixture(scope="session")
def shipped() -> Path:
    return EXAMPLES / "tiny-qwen3-vl"
