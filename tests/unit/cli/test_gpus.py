"""Processes of a local run get the GPUs that this one may use, and no others."""

import pytest

from stage2_api.errors import ConfigError
from stage2_cli.gpus import devices, require


def named(value):
    return {} if value is None else {"CUDA_VISIBLE_DEVICES": value}


@pytest.mark.parametrize(
    ("visible", "first", "last"),
    [
        (None, "0,1,2", "3"),
        ("4,5,6,7", "4,5,6", "7"),
        ("GPU-a, GPU-b,GPU-c,GPU-d", "GPU-a,GPU-b,GPU-c", "GPU-d"),
        ("", "", ""),
    ],
)
def test_places_are_counted_among_the_visible_ones(visible, first, last):
    require(4, named(visible))
    assert devices(range(3), named(visible)) == first
    assert devices(range(3, 4), named(visible)) == last


def test_too_few_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES: '4,5'.*asks for, which is 4"):
        require(4, named("4,5"))
