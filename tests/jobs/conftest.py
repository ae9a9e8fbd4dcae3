"""Jobs that train in real pods may take long; the first run on a machine builds the images."""

from pathlib import Path

import pytest

from tests.support.clusters import BUILD_TIMEOUT_S

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def gpus() -> int:
    """Enough for two jobs at a time."""
    return 12


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every job of this folder."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_S))
