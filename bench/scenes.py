"""Random scenes: true objects and a prediction near each one."""

from __future__ import annotations

import numpy as np

from stage2_api.coordinates import MAX_BIN
from stage2_trainer.matching import GTObject


def scene(count: int, polygons: float, seed: int = 0) -> tuple[list[GTObject], list[GTObject]]:
    """Predictions and as many true objects, a share of them polygons."""
    rng = np.random.default_rng(seed)
    truth = [_object(rng, polygon=rng.random() < polygons) for _ in range(count)]
    return [_near(one, rng) for one in truth], truth


def all_pairs(count: int) -> np.ndarray:
    """Every index pair of `count` predictions and `count` true objects, (count * count, 2)."""
    return np.stack(np.divmod(np.arange(count**2), count), axis=1)


def _object(rng: np.random.Generator, *, polygon: bool) -> GTObject:
    low, size = rng.integers(0, 850, 2), rng.integers(30, 140, 2)
    if not polygon:
        return GTObject("red box", "bbox", tuple(np.concatenate([low, low + size]).tolist()))
    angles = np.sort(rng.random(rng.integers(3, 13))) * 2 * np.pi
    points = low + size / 2 * (1 + np.stack([np.cos(angles), np.sin(angles)], axis=1))
    return GTObject("blue shape", "poly", tuple(points.astype(int).ravel().tolist()))


def _near(one: GTObject, rng: np.random.Generator) -> GTObject:
    moved = np.clip(np.array(one.bins) + rng.integers(-6, 7, len(one.bins)), 0, MAX_BIN)
    return GTObject(one.desc, one.kind, tuple(moved.tolist()))
