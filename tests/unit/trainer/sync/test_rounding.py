"""Rounding: what of an update is served after 1, 10 and 50 steps, nearest or stochastic, and that the mean is right."""

import pytest
import torch

from stage2_trainer.sync.tensors.merge_math import NEAREST, Adapter, KeptUpdate, Rounding
from tests.unit.trainer.sync.exactness import merged_weight, rounded

LEARNING_RATE = 2e-5


def dora_after(steps):
    """A DoRA layer after so many steps of Adam, each of which moves every number by the learning rate."""
    torch.manual_seed(9)
    base = (torch.randn(256, 512) * 0.03).to(torch.bfloat16)
    up = torch.randn(256, 16).sign() * LEARNING_RATE * steps
    down = (torch.rand(16, 512) * 2 - 1) * 512**-0.5
    norm = base.double().norm(dim=1).float()
    return base, merged_weight(base, Adapter(up, down, 2.0, norm + LEARNING_RATE * steps))


def kept(base, merged, rounding):
    kept = KeptUpdate()
    kept.add(base, merged, rounded(rounding, "w", merged, base.dtype))
    return kept.share()


def test_to_the_nearest_a_young_update_is_lost():
    shares = [kept(*dora_after(steps), NEAREST) for steps in (1, 10, 50)]
    assert shares == sorted(shares)
    assert shares[0] < 0.3 < 0.5 < shares[1] < 1.05
    assert shares[2] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("steps", [1, 10, 50])
def test_stochastic_rounding_serves_an_update_whole_in_the_mean(steps):
    base, merged = dora_after(steps)
    assert kept(base, merged, Rounding(steps)) == pytest.approx(1, abs=0.25)
    versions = 400
    mean = sum(rounded(Rounding(v), "w", merged, base.dtype).double() for v in range(versions)) / versions
    update, served = merged.double() - base.double(), mean - base.double()
    assert float((served * update).sum() / update.square().sum()) == pytest.approx(1, abs=0.02)
    step = merged.abs().log2().floor().exp2().double() * 2**-7
    assert ((mean - merged.double()).abs() <= step * 6 / (2 * versions**0.5)).all()


def test_equal_seeds_give_equal_bytes_and_others_do_not():
    _, merged = dora_after(1)
    once = rounded(Rounding(3), "w", merged, torch.bfloat16)
    assert torch.equal(rounded(Rounding(3), "w", merged.clone(), torch.bfloat16), once)
    assert not torch.equal(rounded(Rounding(4), "w", merged, torch.bfloat16), once)
    assert not torch.equal(rounded(Rounding(3), "v", merged, torch.bfloat16), once)


def test_a_neighbour_is_chosen_and_what_is_exact_stays():
    torch.manual_seed(1)
    values = torch.randn(10_000)
    found = rounded(Rounding(1), "w", values, torch.bfloat16)
    assert ((found.float() - values).abs() < values.abs() * 2**-7).all()
    exact = values.to(torch.bfloat16)
    assert torch.equal(rounded(Rounding(1), "w", exact.float(), torch.bfloat16), exact)


def test_what_is_not_finite_stays():
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    torch.testing.assert_close(rounded(Rounding(1), "w", values, torch.bfloat16).float(), values, equal_nan=True)


def test_other_dtypes_are_rounded_to_the_nearest():
    values = torch.randn(100)
    assert torch.equal(rounded(Rounding(1), "w", values, torch.float32), values)
    assert torch.equal(rounded(Rounding(1), "w", values, torch.float16), values.half())


def test_float32_keeps_all_and_no_update_loses_nothing():
    base, merged = dora_after(1)
    assert kept(base.float(), merged, NEAREST) == pytest.approx(1)
    assert kept(base, base.float(), NEAREST) == 1
    assert KeptUpdate().share() == 1
    norm = base.double().norm(dim=1).float()
    untrained = merged_weight(base, Adapter(torch.zeros(256, 16), torch.ones(16, 512), 2.0, norm))
    assert kept(base, untrained, NEAREST) == 1
