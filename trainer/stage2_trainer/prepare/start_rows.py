"""The rows with which new coordinate tokens start, in an embedding table or in an output head.

Stock models were never trained on these tokens: a row of random numbers would be as far from every text as it can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from stage2_api.coordinates import BINS

Start = Literal["numerals", "ramp", "mean"]
STARTS: tuple[Start, ...] = get_args(Start)
BLUR_BINS = 3.0
LONGEST_PERIOD, SHORTEST_PERIOD = 2000.0, 40.0


def start_rows(table: Tensor, how: Start, spell: Callable[[str], Sequence[int]]) -> Tensor:
    """Return a row for each bin, (1000, H) float32.

    table: (V, H), the rows that the model has. spell: the ids of a text. how: `numerals` takes the mean row of the
    tokens that spell the bin's number, blurred over its neighbours, so that near bins are alike; `ramp` the mean of the
    table and sines and cosines of the bin, as wide as the table is; `mean` the mean of the table alone.
    """
    known = table.float()
    middle: Tensor = known.mean(0)
    if how == "mean":
        return middle.repeat(BINS, 1)
    rows = _ramp(known) if how == "ramp" else _numerals(known, spell) - middle
    width: Tensor = (known - middle).norm(dim=1).mean()
    found: Tensor = middle + rows * (width / rows.norm(dim=1).mean().clamp_min(1e-12))
    return found


def _numerals(known: Tensor, spell: Callable[[str], Sequence[int]]) -> Tensor:
    numbers = torch.stack([known[torch.tensor(list(spell(str(number))))].mean(0) for number in range(BINS)])
    distance = torch.arange(BINS)[:, None] - torch.arange(BINS)[None, :]
    weights = torch.exp(-0.5 * (distance / BLUR_BINS) ** 2)
    return (weights / weights.sum(1, keepdim=True)).to(numbers) @ numbers


def _ramp(known: Tensor) -> Tensor:
    """Return sin and cos of 2 pi k / P for periods P from 2000 to 40 bins, turned by a rotation of its own seed."""
    size = known.shape[1]
    pairs = size // 2
    periods = torch.logspace(math.log10(LONGEST_PERIOD), math.log10(SHORTEST_PERIOD), pairs)
    angles = 2 * math.pi * torch.arange(BINS)[:, None] / periods
    waves = torch.cat([angles.sin(), angles.cos(), torch.zeros(BINS, size - 2 * pairs)], dim=1)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0))).Q
    turned: Tensor = waves @ rotation
    return turned
