"""Tests of the controller and of the local cluster may take long; the first run on a machine builds Kubernetes."""

from pathlib import Path

import pytest

from tests.support.clusters import BUILD_TIMEOUT_S

HERE = Path(__file__).parent
FIRST = "test_local_cluster_lifecycle.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that boot and crash a cluster of their own come before one is shared."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_S))
    items.sort(key=lambda item: item.path.name != FIRST)
