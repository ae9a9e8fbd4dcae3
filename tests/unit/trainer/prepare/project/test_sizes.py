"""The sizes of a run hold the data that they come from; the YAML gives the reasons beside them."""

import math
from collections import Counter

import pytest
import yaml

from stage2_trainer.prepare.project_folder import MOST_HELD_OUT, choose_held_out, fill
from stage2_trainer.prepare.project_sizes import (
    EVALUATIONS,
    MOST_PIXELS,
    ROW_TOKENS,
    TOP_K,
    Chosen,
    Measures,
    Patches,
    choose,
)

QWEN = Patches(side=32, least=256**2, most=16_777_216)
COCO = Measures(
    records=117_000,
    held_out=4_900,
    objects=93,
    longest_answer=2_200,
    mean_answer=175.0,
    prompt=60,
    images=Counter({(640, 480): 90_000, (480, 640): 27_000, (500, 375): 4_900}),
    patches=QWEN,
)
FEW = Measures(
    records=6,
    held_out=2,
    objects=2,
    longest_answer=50,
    mean_answer=40.0,
    prompt=20,
    images=Counter({(96, 72): 8}),
    patches=Patches(side=16, least=32**2, most=96**2),
)
LARGE_IMAGES = Measures(**{**vars(COCO), "images": Counter({(4000, 3000): 10, (640, 480): 5})})


@pytest.mark.parametrize("gpus", range(7))
@pytest.mark.parametrize("found", [COCO, FEW, LARGE_IMAGES])
def test_chosen_sizes_fit_measured_data(found, gpus):
    sizes = choose(found, gpus=gpus)
    image = max(found.patches.tokens(size, sizes.max_pixels.value) for size in found.images)
    prompt = found.prompt + image
    assert sizes.max_new_tokens.value > found.longest_answer
    assert sizes.max_model_len.value > prompt + sizes.max_new_tokens.value
    assert sizes.stage1.row.value >= prompt + found.longest_answer
    assert sizes.stage2.row.value >= prompt + sizes.max_new_tokens.value + found.longest_answer
    for stage, processes in ((sizes.stage1, max(gpus, 1)), (sizes.stage2, 1)):
        assert stage.records.value <= found.records
        assert stage.micro * processes <= max(stage.records.value, processes)
        assert stage.steps.value == EVALUATIONS * stage.evaluate_every.value


@pytest.mark.parametrize("gpus", range(17))
@pytest.mark.parametrize("records", [16, 100, 117_000])
def test_effective_batch_size_is_reached_exactly(records, gpus):
    """Semantics: accumulation = ceil(effective_batch_size / (micro-batch * processes))."""
    sizes = choose(Measures(**{**vars(COCO), "records": records}), gpus=gpus)
    for stage, processes in ((sizes.stage1, max(gpus, 1)), (sizes.stage2, 1)):
        at_once = stage.micro * processes
        assert stage.records.value == math.ceil(stage.records.value / at_once) * at_once <= records
    if gpus:
        passes = sizes.stage1.steps.value * sizes.stage1.records.value / records
        assert passes >= 4
        assert sizes.stage1.steps.value < 4 * records / sizes.stage1.records.value + EVALUATIONS


def test_sizes_for_coco_on_four_gpus_equal_expert_choice():
    sizes = choose(COCO, gpus=4)
    assert sizes.max_pixels.value == 640 * 480
    assert sizes.stage1.records.value == 128
    assert sizes.stage1.steps.value == pytest.approx(117_000 * 4 / 128, rel=0.01)
    assert 10_000 < sizes.stage1.row.value <= ROW_TOKENS
    assert sizes.stage2.steps.value == 300
    assert sizes.sigma.value == 2.1  # a pixel of the smallest image is 2.6 bins wide
    assert (sizes.top_k.value, sizes.looked_at.value) == (TOP_K, 256)


def test_max_pixels_is_size_of_largest_image_after_resizing():
    # 500 x 375 becomes 512 x 384: a limit of 187,500 would make it smaller than the processor does
    found = Measures(**{**vars(COCO), "images": Counter({(500, 375): 1})})
    limit = choose(found, gpus=4).max_pixels.value
    assert limit == 512 * 384
    assert QWEN.resized((500, 375), limit) == QWEN.resized((500, 375)) == (512, 384)


def test_max_pixels_has_upper_limit():
    sizes = choose(LARGE_IMAGES, gpus=4)
    assert sizes.max_pixels.value == MOST_PIXELS
    assert "1,024 tokens" in sizes.max_pixels.why


def test_target_sigma_is_not_finer_than_pixel_of_smallest_image():
    sizes = choose(FEW, gpus=0)
    assert sizes.sigma.value == 12.5  # of 1000 bins on 64 pixels, four fifths of one pixel
    assert choose(LARGE_IMAGES, gpus=4).sigma.value == 2.0


def test_reasons_of_chosen_sizes_name_measurements():
    sizes = choose(COCO, gpus=4)
    assert "2,200 tokens" in sizes.max_new_tokens.why
    assert "117,000 records" in sizes.stage1.steps.why
    assert "93 objects" in sizes.top_k.why


@pytest.mark.parametrize(
    "value",
    ["", "yes", "# no comment", "a: b", "'", "line\nline", "a\x85b", "\u2028", "\x1b", "ü", True, [], {}, 1e-6, "1e-6"],
)
def test_filled_template_returns_any_value_unchanged(value):
    text = fill("a:\n  b: {{ b }}\nc: {{ c }}\nd:\n  - {{ c }}\n", b=Chosen(value, "why"), c=value)
    assert yaml.safe_load(text) == {"a": {"b": value}, "c": value, "d": [value]}


def test_reason_is_written_after_value_or_above_if_too_long():
    long = "why " * 30
    text = fill("a:\n  b: {{ b }}\n  c: {{ c }}\n", b=Chosen(1, "few"), c=Chosen(2, long))
    assert text.splitlines() == ["a:", "  b: 1 # few", f"  # {long}", "  c: 2"]


def ids(count):
    return [str(number) for number in range(count)]


@pytest.mark.parametrize(("count", "expected"), [(2, 1), (20, 1), (200, 10), (100_000, MOST_HELD_OUT)])
def test_number_of_held_out_records_follows_total(count, expected):
    assert len(choose_held_out(ids(count))) == expected


def test_held_out_records_do_not_depend_on_order():
    assert choose_held_out(ids(100)) == choose_held_out(ids(100)[::-1])


def test_held_out_records_are_spread_over_file():
    numbers = sorted(int(one) for one in choose_held_out(ids(1000)))
    assert numbers[0] < 200
    assert numbers[-1] > 800


def test_most_held_out_records_stay_when_images_are_added():
    before, after = choose_held_out(ids(1000)), choose_held_out(ids(1100))
    assert len(before & after) > 0.8 * len(before)
