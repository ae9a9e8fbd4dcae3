"""Fixtures of more than one tier of tests."""

import gc
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.support.tools import tool

os.environ["ROOT_IMAGE_DIR"] = tempfile.gettempdir()  # records of a test name images of other temporary folders

pytest_plugins = [
    "pytester",
    "tests.support.clusters",
    "tests.support.costs",
    "tests.support.together",
    "tests.support.turns",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported objects from garbage collection: they stay, and imports and transformers collect often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture
def networks() -> Iterator[None]:
    """The networks of this machine, for one test at a time: it changes them, or compares what they were."""
    with FileLock(Path(tempfile.gettempdir()) / "stage2-test-networks.lock"):
        yield


@pytest.fixture(scope="session")
def helm() -> str:
    """helm, which goes by the cluster that a test names: its own variables would lead elsewhere."""
    for name in [name for name in os.environ if name.startswith(("HELM_KUBE", "HELM_NAMESPACE"))]:
        del os.environ[name]
    return tool("helm")


@pytest.fixture(scope="session")
def promtool() -> str:
    """promtool."""
    return tool("promtool")
