"""Handwritten digits as ink: scikit-learn's scans of 8x8 pixels, enlarged smoothly, stretched and turned a little.

Train and test scans are apart. The data set holds the scans in the order of their writers, so the writers are too, but
for the one at the border.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

Name = Literal["train", "test"]
Coverage = NDArray[np.float32]

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FIRST_TEST_SCAN = 1400  # of 1,797
TURN_DEGREES = 12.0
STRETCH = 0.15
_DARKEST = 16.0  # of a scan
_MARGIN = 2  # empty pixels around a scan, for the strokes to end softly
_FINER = 2  # strokes are cut out at so many times the size, for smooth edges
_PAPER, _STROKE = 0.4, 0.58  # darkness that is paper, and that is ink all through
_SEEN = 0.5


@dataclass(frozen=True)
class Ink:
    """A digit that is drawn: which one, of which scan, and the share of each pixel that its ink covers.

    `coverage` (height, width) ends where the ink does: its first and last row and column each have a pixel that is ink
    by half or more.
    """

    digit: int
    scan: int
    coverage: Coverage


def make_ink(rng: random.Random, part: Name, height: float, kinds: int = len(NAMES)) -> Ink:
    """Return one of the part's digits, about `height` pixels high; of the first so many kinds."""
    images, labels = _scans()
    scan = rng.choice(scans_of(part, kinds))
    wider, degrees = 1 + rng.uniform(-STRETCH, STRETCH), rng.uniform(-TURN_DEGREES, TURN_DEGREES)
    return Ink(int(labels[scan]), scan, _drawn(images[scan], height, wider, degrees))


@cache
def scans_of(part: Name, kinds: int = len(NAMES)) -> Sequence[int]:
    """Return the numbers of a part's scans of the first so many kinds."""
    _, labels = _scans()
    every = range(FIRST_TEST_SCAN) if part == "train" else range(FIRST_TEST_SCAN, len(labels))
    return [scan for scan in every if labels[scan] < kinds]


@cache
def _scans() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    found = load_digits()
    return found.images, found.target


def _drawn(scan: NDArray[np.float64], height: float, wider: float, degrees: float) -> Coverage:
    darkness = Image.fromarray(np.pad(scan / _DARKEST, _MARGIN).astype(np.float32))
    rows = int((scan > _DARKEST / 2).any(axis=1).sum())
    scale = height / max(rows, 1) * _FINER
    size = round(darkness.width * scale * wider), round(darkness.height * scale)
    large = darkness.resize(size, Image.Resampling.BICUBIC).rotate(degrees, Image.Resampling.BICUBIC, expand=True)
    stroke = np.clip((np.asarray(large) - _PAPER) / (_STROKE - _PAPER), 0, 1)
    smooth = stroke * stroke * (3 - 2 * stroke)
    target = max(round(large.width / _FINER), 1), max(round(large.height / _FINER), 1)
    coverage = np.asarray(Image.fromarray(smooth).resize(target, Image.Resampling.BOX), dtype=np.float32)
    seen = coverage >= _SEEN
    columns, lines = np.flatnonzero(seen.any(axis=0)), np.flatnonzero(seen.any(axis=1))
    return coverage[lines[0] : lines[-1] + 1, columns[0] : columns[-1] + 1]
