"""What more than one tier of tests stands on."""

import gc

import pytest

from tests.tools import tool

pytest_plugins = ["tests.clusters"]


def pytest_collection_finish() -> None:
    """Take what was imported out of each garbage collection: it is there to stay, and transformers collects often."""
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
