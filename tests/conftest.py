"""Fixtures of more than one tier of tests."""

import gc
import os
import tempfile

import pytest

from tests.tools import tool

os.environ["ROOT_IMAGE_DIR"] = tempfile.gettempdir()  # records of a test name images of other temporary folders

pytest_plugins = ["tests.clusters"]


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: they stay, and transformers collects often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def helm() -> str:
    """helm."""
    return tool("helm")


@pytest.fixture(scope="session")
def promtool() -> str:
    """promtool."""
    return tool("promtool")
