"""The compiled merge: the bits of torch's, whatever is merged, and used only where it pays."""

import logging
import sys

import numpy as np
import pytest
import torch

from stage2_trainer.sync.tensors import merge_kernel, merge_math
from stage2_trainer.sync.tensors.merge_math import Adapter, KeptUpdate, Rounding, served_weight
from tests.unit.trainer.sync.exactness import layer, merged_weight, rounded

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 2), (2, 255), (7, 256), (64, 257), (67, 301), (33, 1024), (3, 4099)]
SMALLEST = 2.0**-149  # of float32


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def by_torch(monkeypatch, call):
    monkeypatch.setattr(merge_math, "_kernel_for", lambda base: None)
    return call()


def by_kernel(monkeypatch, call):
    monkeypatch.setattr(merge_math, "_kernel_for", lambda base: merge_kernel)
    return call()


def same_bits(one, other):
    """Whether two float32 tensors agree in each bit; a NaN is a NaN, whose bits are the machine's affair."""
    nan = one.isnan() & other.isnan()
    return bool(((one.view(torch.int32) == other.view(torch.int32)) | nan).all())


def assert_same(monkeypatch, base, adapter):
    expected = by_torch(monkeypatch, lambda: merged_weight(base, adapter))
    found = by_kernel(monkeypatch, lambda: merged_weight(base, adapter))
    assert same_bits(expected, found)
    return found


def of_any_magnitude(shape, generator, low, high):
    """Numbers of which each is of its own magnitude, from 2^low to 2^high, zeros of both signs among them."""
    exponents = torch.empty(shape).uniform_(low, high, generator=generator)
    signs = torch.randint(-1, 2, shape, generator=generator).float()
    return torch.randn(shape, generator=generator) * torch.exp2(exponents) * signs


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 7, 8, 16, 33, 64])
def test_ranks_dtypes_and_odd_shapes(rank, dtype, dora, monkeypatch):
    for shape in SHAPES:
        assert_same(monkeypatch, *layer(shape, rank, dtype, dora=dora, seed=rank))


@pytest.mark.parametrize("dora", [False, True])
def test_a_large_weight_and_any_number_of_threads(dora, threads, monkeypatch):
    assert_same(monkeypatch, *layer((1027, 513), 16, torch.bfloat16, dora=dora))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_adversarial_magnitudes(seed, dora, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    shape, rank = SHAPES[2 + seed % 5], 1 + seed
    base = of_any_magnitude(shape, generator, -149, 60 + seed)
    up = of_any_magnitude((shape[0], rank), generator, -100, 30)
    down = of_any_magnitude((rank, shape[1]), generator, -140 + seed, 20)
    magnitude = of_any_magnitude((shape[0],), generator, -80, 80) if dora else None
    assert_same(monkeypatch, base, Adapter(up, down, 10.0 ** (seed - 10), magnitude))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_numbers_are_not_flushed(dtype, dora, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    step = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: SMALLEST}[dtype]
    base = (torch.randint(-50, 50, (16, 600), generator=generator) * step).to(dtype)
    up, down = torch.randn(16, 4, generator=generator) * 2.0**-70, torch.randn(4, 600, generator=generator) * 2.0**-70
    found = assert_same(monkeypatch, base, Adapter(up, down, 1.0, torch.full((16,), 4 * step) if dora else None))
    assert found.count_nonzero() > 0


@pytest.mark.parametrize("dora", [False, True])
def test_rows_and_columns_of_zeros_keep_their_signs(dora, monkeypatch):
    base, adapter = layer((66, 300), 9, dora=dora)
    base[3], adapter.up[3], base[:, 7], adapter.down[:, 7], adapter.down[2] = -0.0, 0, -0.0, -0.0, 0
    adapter.up[5], base[6] = -0.0, 0.0
    assert_same(monkeypatch, base, adapter)


@pytest.mark.parametrize("rank", [1, 5])
def test_an_adapter_that_adds_nothing_to_zeros_of_both_signs(rank, monkeypatch):
    base = torch.zeros(40, 300)
    base[::2] = -0.0
    assert_same(monkeypatch, base, Adapter(torch.zeros(40, rank), -torch.ones(rank, 300), 2.0))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3.4e38])
@pytest.mark.parametrize("place", ["base", "up", "down", "magnitude"])
def test_what_is_not_finite(place, value, dora, monkeypatch):
    base, adapter = layer((20, 300), 4, dora=dora)
    tensors = {"base": base, "up": adapter.up, "down": adapter.down, "magnitude": adapter.magnitude}
    if tensors[place] is None:
        return
    tensors[place][3] = value
    found = assert_same(monkeypatch, base, adapter)
    assert value == 3.4e38 or not found[3].isfinite().all()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("width", [2, 3, 4, 255, 256, 4097])
def test_norms_have_the_bits_of_the_double(width, seed):
    """What a float32 result would hide: that a square is rounded before it is added to the place of units."""
    generator = torch.Generator().manual_seed(seed)
    rows = of_any_magnitude((50, width), generator, -60, 60 * (seed % 3)).double() * (1 + 2.0**-40)
    found = [merge_kernel.norm(row.numpy()) for row in rows]
    assert found == merge_math._row_norms(rows).tolist()


def test_a_norm_of_what_is_too_large_is_none():
    rows = torch.full((1, 300), 1e160, dtype=torch.float64)
    assert merge_math._row_norms(rows).isnan().all()
    assert np.isnan(merge_kernel.norm(rows[0].numpy()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_factors_lie_on_the_same_grids(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    up = of_any_magnitude((33, 1 + seed), generator, -150, 10 * seed).to(dtype)
    down = of_any_magnitude((70, 1 + seed), generator, -150, 10 * seed).to(dtype).T  # as of an embedding's adapter
    found = merge_math._factors_for(merge_kernel, Adapter(up, down, 0.3))
    expected = merge_math._factors(Adapter(up, down, 0.3))
    assert all(np.array_equal(one, other.numpy(), equal_nan=True) for one, other in zip(found, expected, strict=False))


@pytest.mark.parametrize("rounding", [Rounding(), Rounding(3)])
@pytest.mark.parametrize("tile", [4000, 2**17])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_served_and_what_is_known_of_it_are_the_same(dtype, dora, tile, rounding, threads, monkeypatch):
    base, adapter = layer((203, 777), 16, dtype, dora=dora)
    torch_kept, kernel_kept = KeptUpdate(), KeptUpdate()
    expected = by_torch(monkeypatch, lambda: served_weight("w", base, adapter, rounding, torch_kept))
    whole = rounded(rounding, "w", merged_weight(base, adapter), dtype)
    monkeypatch.setattr(merge_math, "KERNEL_TILE", tile)
    found = by_kernel(monkeypatch, lambda: served_weight("w", base, adapter, rounding, kernel_kept))
    assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8))
    assert torch.equal(whole.view(torch.uint8), found.view(torch.uint8))
    assert torch_kept.share() == kernel_kept.share()


@pytest.mark.parametrize("sign", [1, -1])
def test_each_number_is_rounded_to_the_bfloat16_to_which_torch_rounds_it(sign):
    """Ties go to the even neighbour, also into the next power of two; what is too large becomes infinite."""
    below = torch.arange(2**15 - 2**7, dtype=torch.int32)[:, None] << 16
    numbers = sign * (below + torch.tensor([0, 1, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1])).view(torch.float32)
    found = [merge_kernel._to_bfloat16(number, 0, 0) for number in numbers.flatten().tolist()]
    assert found == numbers.flatten().to(torch.bfloat16).view(torch.uint16).tolist()
    assert torch.tensor(merge_kernel._to_bfloat16(float("nan"), 0, 0), dtype=torch.uint16).view(torch.bfloat16).isnan()


@pytest.mark.parametrize("seed", range(10))
def test_each_number_is_rounded_up_or_down_as_torch_rounds_it_at_its_place(seed):
    """Of any magnitude, also into the next power of two, to infinity, and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    numbers = of_any_magnitude((500,), generator, -149, 127)
    numbers[:6] = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4028e38, -3.4028e38, SMALLEST])
    first, rounding = 10**seed, Rounding(seed)
    expected = torch.empty(500, dtype=torch.bfloat16)
    rounding.write("w", numbers, expected, first=first)
    key = np.uint64(rounding.key("w", torch.bfloat16) % 2**64)
    found = [merge_kernel._up_or_down(one, np.uint64(first + i), key) for i, one in enumerate(numbers.tolist())]
    assert torch.equal(
        torch.tensor(found, dtype=torch.uint16).view(torch.bfloat16).nan_to_num(7), expected.nan_to_num(7)
    )
    assert len({one & 1 for one in found}) == 2


def test_one_pass_is_made_whatever_the_rounding(monkeypatch):
    """The loop over tiles, which takes a pass more for noise, is for what the kernel cannot."""
    monkeypatch.setattr("stage2_trainer.sync.tensors.merge_math.merged_tiles", lambda *_: 1 / 0)
    base, adapter = layer((512, merge_math.KERNEL_WEIGHTS // 512), 4, torch.bfloat16, dora=True)
    for rounding in (Rounding(), Rounding(3)):
        assert served_weight("w", base, adapter, rounding, KeptUpdate()).isfinite().all()


def test_parameters_and_slices_are_merged_alike(monkeypatch):
    base, adapter = layer((64, 600), 4, dora=True)
    trained = Adapter(*(torch.nn.Parameter(of) for of in (adapter.up, adapter.down)), 2.0, adapter.magnitude)
    found = by_kernel(monkeypatch, lambda: merged_weight(torch.nn.Parameter(base.T.contiguous().T), trained))
    assert same_bits(found, by_torch(monkeypatch, lambda: merged_weight(base, adapter)))


def test_small_weights_and_other_dtypes_ask_for_no_kernel(monkeypatch):
    asked = []
    monkeypatch.setattr(merge_math, "_kernel", lambda: asked.append(1))
    columns = merge_math.KERNEL_WEIGHTS // 512
    merged_weight(*layer((511, columns), 2, dora=False))
    merged_weight(*layer((512, columns), 2, torch.float64, dora=False))
    assert not asked
    merged_weight(*layer((512, columns), 2, dora=False))
    assert asked


def test_without_numba_torch_merges_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, merge_kernel.__name__)
    monkeypatch.delattr(sys.modules["stage2_trainer.sync.tensors"], "merge_kernel")
    merge_math._kernel.cache_clear()
    base, adapter = layer((512, merge_math.KERNEL_WEIGHTS // 512), 4, torch.bfloat16, dora=True)
    with caplog.at_level(logging.INFO):
        found = merged_weight(base, adapter)
        merged_weight(base, adapter)
    merge_math._kernel.cache_clear()
    assert caplog.text.count("without numba: import of numba halted") == 1
    assert same_bits(found, by_kernel(monkeypatch, lambda: merged_weight(base, adapter)))
