"""Golden vectors of chunks and seeds."""

import pytest

from stage2_trainer.rollouts.rollout_source import contiguous_chunks
from stage2_trainer.wire.requests import request_seed
from tests.unit.trainer.matching.golden import golden


@pytest.mark.parametrize("case", golden()["chunks"])
def test_chunks(case):
    assert list(map(list, contiguous_chunks(case["requests"], case["servers"]))) == case["ranges"]


@pytest.mark.parametrize("case", golden()["seeds"])
def test_seeds(case):
    plan = (case["training_seed"], case["global_step"], case["micro_step"], case["index"])
    assert request_seed(*plan) == case["seed"]
