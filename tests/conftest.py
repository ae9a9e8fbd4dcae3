"""What more than one tier of tests stands on."""

import pytest

from tests.tools import tool

pytest_plugins = ["tests.clusters"]


@pytest.fixture(scope="session")
def helm() -> str:
    """helm."""
    return tool("helm")


@pytest.fixture(scope="session")
def promtool() -> str:
    """promtool."""
    return tool("promtool")
