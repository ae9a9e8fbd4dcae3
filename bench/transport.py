"""Polygon transport of one answer's pairs, all at once, against POT pair by pair."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from bench.scenes import scene
from bench.tables import Row, Table, installed, seconds

from stage2_trainer.matching.geometry import points_of
from stage2_trainer.matching.sinkhorn import barycentric

EPSILON, ROUNDS = 10.0, 30


def rows() -> Iterator[Row]:
    """100 polygons against 100 polygons."""
    ot = installed("ot")
    if not ot:
        return
    x, y = ([points_of(one).astype(float) for one in side] for side in scene(100, 1.0))
    epsilon = np.full(len(x), EPSILON)
    found = barycentric(x, y, epsilon, iterations=ROUNDS)
    ours = seconds(lambda: barycentric(x, y, epsilon, iterations=ROUNDS))
    for method in ("sinkhorn_log", "sinkhorn"):

        def theirs(method: str = method) -> list[np.ndarray]:
            moved = []
            for one, other in zip(x, y, strict=True):
                # POT updates the columns first, ours the rows: transposed, both do the same rounds.
                cost = np.linalg.norm(other[:, None] - one[None], axis=-1)
                a, b = np.full(len(other), 1 / len(other)), np.full(len(one), 1 / len(one))
                plan = ot.sinkhorn(a, b, cost, EPSILON, method=method, numItermax=ROUNDS, stopThr=0, warn=False).T
                moved.append(plan @ other / plan.sum(axis=1, keepdims=True))
            return moved

        difference = max(np.abs(a - b).max() for a, b in zip(found, theirs(), strict=True))
        what = f"100 polygons, {ROUNDS} rounds"
        yield Row(what, f"POT {method}, pair by pair", ours, seconds(theirs), f"{difference:.2g} bins")


TABLE = Table("Transport", "ms", 1e3, rows)
