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


@pytest.fixture
def make(folder, stack, model, encoder):
    """A function that builds a trainer on the folder's records; its answers are scripted unless it has a source."""

    def build(*patches, source=None, policy=model):
        policy.train()
        source = source or harness.Scripted(encoder, harness.answers(encoder))
        trainer = harness.build(folder, harness.config(folder, *patches), policy, encoder, source, stack)
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return build
