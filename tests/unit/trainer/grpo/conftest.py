"""A folder with two records, and a stack that closes what a trainer opens."""

from contextlib import ExitStack

import pytest

from tests.unit.trainer.grpo import harness


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def folder(tmp_path, image_paths):
    harness.write_records(tmp_path, image_paths[:2])
    return tmp_path
