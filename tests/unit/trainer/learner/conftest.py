"""Fixtures of the learner's tests; heavy libraries are imported where they are used."""

from __future__ import annotations

import pytest


@pytest.fixture
def model(model):
    """The tiny model, set up to train."""
    from stage2_trainer.model.transformers_compat import disable_cache

    disable_cache(model)
    return model


@pytest.fixture
def records(image_paths):
    """Three records of a red and a blue box."""
    from tests.unit.trainer.learner.harness import two_boxes

    return two_boxes(image_paths)


@pytest.fixture
def make(tmp_path, model, encoder, records):
    """A function that builds a harness of one step on the records, with options changed."""
    from tests.unit.trainer.learner.harness import build

    return lambda **changes: build(tmp_path, model, encoder, records, **changes)


@pytest.fixture
def matcher(encoder):
    from tests.unit.trainer.learner.harness import sample_tools

    return sample_tools(encoder).matcher


@pytest.fixture
def trained(tmp_path, model, encoder, image_paths):
    """A function that trains one step on three records; returns the log, the matched samples and the harness."""
    from tests.unit.trainer.learner.harness import box, build, record

    records = [record(path, i, object_1=box("red box", 100, 100, 400, 400)) for i, path in enumerate(image_paths)]

    def run(records=records, prepare=lambda learner: None, **options):
        harness = build(tmp_path, model, encoder, records, **options)
        prepare(harness.learner)
        return harness.train(), harness.matched, harness

    return run
