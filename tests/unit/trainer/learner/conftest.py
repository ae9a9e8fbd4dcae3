"""A port for learner processes that meet, and a trainer whose answers are written down."""

from __future__ import annotations

import pytest


@pytest.fixture
def trained(tmp_path, model, encoder, image_paths):
    """A function that trains one step on three records, and returns what it said of it and the samples it matched."""
    from stage2_trainer.process.transformers_compat import disable_cache
    from tests.unit.trainer.learner.harness import box, build, record

    disable_cache(model)
    records = [record(path, i, object_1=box("red box", 100, 100, 400, 400)) for i, path in enumerate(image_paths)]

    def run(records=records, prepare=lambda trainer: None, **options):
        harness = build(tmp_path, model, encoder, records, **options)
        prepare(harness.trainer)
        return harness.train(), harness.matched, harness

    return run
