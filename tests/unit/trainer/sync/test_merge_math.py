"""The merge: exact arithmetic, the same bits however it is cut up, and a rounding whose mean is right."""

import fractions
import math

import pytest
import torch

from stage2_trainer.sync.tensors import merge_math
from stage2_trainer.sync.tensors.merge_math import Adapter, kept_share, kept_sums, served_weight
from tests.unit.trainer.sync.exactness import layer, merged_weight, rounded

OUT, IN, RANK = 67, 301, 6


def exact_row(base, adapter, row):
    """One row in rational numbers, but for the root of the norm."""
    number = fractions.Fraction
    weights = [number(float(w)) for w in base[row]]
    up = [number(float(b)) for b in adapter.up[row]]
    scaling = number(adapter.scaling)
    merged = [
        w + scaling * sum(b * number(float(a)) for b, a in zip(up, adapter.down[:, i], strict=True))
        for i, w in enumerate(weights)
    ]
    if adapter.magnitude is None:
        return torch.tensor([float(w) for w in merged], dtype=torch.float64)
    norm = float(sum(w * w for w in merged)) ** 0.5
    return torch.tensor([float(w) * float(adapter.magnitude[row]) / norm for w in merged], dtype=torch.float64)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_equals_exact_merge_rounded_to_float32(dtype, dora):
    base, adapter = layer((OUT, IN), RANK, dtype, dora=dora)
    merged = merged_weight(base, adapter)
    assert merged.dtype == torch.float32
    for row in range(0, OUT, 13):
        exact = exact_row(base, adapter, row)
        largest = exact.abs().max()
        assert ((merged[row].double() - exact).abs() <= exact.abs() * 2**-24 + largest * 2**-23).all()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("tile", [4000, 2**24])
def test_merge_is_bitwise_equal_for_any_threads_and_tile_size(dora, threads, tile, monkeypatch):
    base, adapter = layer((512, 777), 16, dora=dora)
    expected = merged_weight(base, adapter)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setitem(merge_math.TILE_ELEMENTS, "cpu", tile)
    found = merged_weight(base, adapter)
    torch.set_num_threads(before)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dora", [False, True])
def test_merge_is_bitwise_equal_for_any_order_of_sums(dora):
    """What no number of threads shows: other orders, as another device's multiplication may have them."""
    base, adapter = layer((OUT, IN), RANK, dora=dora)
    columns, ranks = torch.randperm(IN), torch.randperm(RANK)
    shuffled = Adapter(adapter.up[:, ranks], adapter.down[ranks][:, columns], adapter.scaling, adapter.magnitude)
    assert torch.equal(merged_weight(base[:, columns], shuffled), merged_weight(base, adapter)[:, columns])


def test_sums_of_norms_are_exact_in_any_order():
    matrix = torch.randn(512, IN, dtype=torch.float64)
    norms = merge_math._row_norms(matrix)
    assert all(torch.equal(merge_math._row_norms(matrix[:, torch.randperm(IN)]), norms) for _ in range(5))


def test_served_weight_and_kept_update_do_not_depend_on_tile_size(monkeypatch):
    base, adapter = layer((OUT, IN), RANK, torch.bfloat16, dora=True)

    def served(tile):
        monkeypatch.setitem(merge_math.TILE_ELEMENTS, "cpu", tile)
        kept = []
        return served_weight("w", base, adapter, 3, kept), kept_share(kept)

    (whole, share), (cut, of_cut) = served(2**24), served(7 * IN)
    assert torch.equal(cut, whole)
    assert of_cut == pytest.approx(share)


def test_plain_float32_merge_depends_on_order_of_sums():
    """The reason for all this; where it no longer holds, `merge_math` can be plain."""
    base, adapter = layer((OUT, IN), RANK, dora=False)
    ranks = torch.randperm(RANK)
    plain = base + adapter.up @ adapter.down
    assert not torch.equal(base + adapter.up[:, ranks] @ adapter.down[ranks], plain)


@pytest.mark.parametrize("dora", [False, True])
def test_zero_adapter_leaves_base_unchanged(dora):
    base, adapter = layer((OUT, IN), RANK, dora=dora)
    nothing = Adapter(torch.zeros_like(adapter.up), adapter.down, 2.0, base.double().norm(dim=1) if dora else None)
    torch.testing.assert_close(merged_weight(base, nothing), base, rtol=2**-23, atol=0)


def test_square_roots_are_correctly_rounded():
    """As another device has them. Those of torch on a CPU are not always."""
    values = torch.rand(10_000, dtype=torch.float64)
    assert merge_math._root(values).tolist() == [math.sqrt(value) for value in values.tolist()]


def test_merged_zero_has_same_sign_at_every_rank():
    base, zero = torch.full((4, 8), -0.0), torch.zeros(4, 1)
    for rank in (1, 2, 9):
        merged = merged_weight(base, Adapter(zero.expand(4, rank), -torch.ones(rank, 8), 1.0))
        assert not merged.signbit().any()


def test_row_of_zeros_merges_to_zeros():
    base, adapter = layer((OUT, IN), RANK, dora=False)
    base[3], adapter.up[3] = 0, 0
    assert torch.equal(merged_weight(base, adapter)[3], torch.zeros(IN))


def test_nan_in_adapter_gives_nan_row():
    base, adapter = layer((OUT, IN), RANK, dora=True)
    adapter.up[2, 1] = float("nan")
    assert merged_weight(base, adapter)[2].isnan().all()


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
    return kept_share([kept_sums(base, merged, rounded(rounding, "w", merged, base.dtype))])


def test_rounding_to_nearest_loses_small_early_updates():
    shares = [kept(*dora_after(steps), None) for steps in (1, 10, 50)]
    assert shares == sorted(shares)
    assert shares[0] < 0.3 < 0.5 < shares[1] < 1.05
    assert shares[2] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("steps", [1, 10, 50])
def test_stochastic_rounding_keeps_whole_update_in_mean(steps):
    base, merged = dora_after(steps)
    assert kept(base, merged, steps) == pytest.approx(1, abs=0.25)
    versions = 400
    mean = sum(rounded(v, "w", merged, base.dtype).double() for v in range(versions)) / versions
    update, served = merged.double() - base.double(), mean - base.double()
    assert float((served * update).sum() / update.square().sum()) == pytest.approx(1, abs=0.02)
    step = merged.abs().log2().floor().exp2().double() * 2**-7
    assert ((mean - merged.double()).abs() <= step * 6 / (2 * versions**0.5)).all()


def test_stochastic_rounding_is_reproducible_by_version_and_name():
    _, merged = dora_after(1)
    once = rounded(3, "w", merged, torch.bfloat16)
    assert torch.equal(rounded(3, "w", merged.clone(), torch.bfloat16), once)
    assert not torch.equal(rounded(4, "w", merged, torch.bfloat16), once)
    assert not torch.equal(rounded(3, "v", merged, torch.bfloat16), once)


def test_stochastic_rounding_picks_neighbour_and_keeps_exact_values():
    torch.manual_seed(1)
    values = torch.randn(10_000)
    found = rounded(1, "w", values, torch.bfloat16)
    assert ((found.float() - values).abs() < values.abs() * 2**-7).all()
    exact = values.to(torch.bfloat16)
    assert torch.equal(rounded(1, "w", exact.float(), torch.bfloat16), exact)


def test_stochastic_rounding_keeps_infinite_nan_and_zero_values():
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    torch.testing.assert_close(rounded(1, "w", values, torch.bfloat16).float(), values, equal_nan=True)


def test_stochastic_rounding_keeps_nan_of_any_bit_pattern():
    values = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert all(rounded(version, "w", values, torch.bfloat16).isnan().all() for version in range(20))


def test_other_dtypes_are_rounded_to_nearest():
    values = torch.randn(100)
    assert torch.equal(rounded(1, "w", values, torch.float32), values)
    assert torch.equal(rounded(1, "w", values, torch.float16), values.half())


def test_kept_update_share_is_one_in_float32_and_undefined_without_update():
    base, merged = dora_after(1)
    assert kept(base.float(), merged, None) == pytest.approx(1)
    assert kept(base, base.float(), None) is None
    assert kept_share([]) is None
    norm = base.double().norm(dim=1).float()
    untrained = merged_weight(base, Adapter(torch.zeros(256, 16), torch.ones(16, 512), 2.0, norm))
    assert kept(base, untrained, None) is None
