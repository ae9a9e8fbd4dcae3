"""Backgrounds: crops of photographs that scikit-learn and scikit-image ship inside their packages.

No photograph is in both parts.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage import data
from sklearn.datasets import load_sample_image

from digits.ink import Name

Pixels = NDArray[np.uint8]

PHOTOGRAPHS: dict[Name, tuple[str, ...]] = {
    "train": ("china", "coffee", "astronaut", "rocket", "retina", "grass"),
    "test": ("flower", "chelsea", "hubble_deep_field", "gravel"),
}
_OF_SCIKIT_LEARN = ("china", "flower")
_SMALLEST_CROP = 0.45  # of the largest crop of its shape
_FADED = (0.35, 0.65)  # share of a crop that is mixed with its mean colour: a printed page, not a bright screen


def background(rng: random.Random, part: Name, index: int, size: tuple[int, int]) -> Pixels:
    """Return a crop (height, width, 3) of the part's photographs in turn; faded, and in half of the cases mirrored."""
    photograph = _photograph(PHOTOGRAPHS[part][index % len(PHOTOGRAPHS[part])])
    width, height = size
    widest = min(photograph.width, photograph.height * width / height)
    wide = widest * rng.uniform(_SMALLEST_CROP, 1)
    high = wide * height / width
    left, top = rng.uniform(0, photograph.width - wide), rng.uniform(0, photograph.height - high)
    crop = photograph.resize((width, height), Image.Resampling.LANCZOS, box=(left, top, left + wide, top + high))
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels, faded = np.asarray(crop, dtype=np.float64), rng.uniform(*_FADED)
    mixed: Pixels = np.rint(pixels * (1 - faded) + pixels.mean(axis=(0, 1)) * faded).astype(np.uint8)
    return mixed


@cache
def _photograph(name: str) -> Image.Image:
    pixels = load_sample_image(f"{name}.jpg") if name in _OF_SCIKIT_LEARN else getattr(data, name)()
    return Image.fromarray(np.asarray(pixels)).convert("RGB")
