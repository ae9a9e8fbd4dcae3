"""The matching beside what one would write or take instead: `python -m bench.matching` prints one table of ratios.

Peers: pycocotools and shapely (mask IoU), a plain double loop (candidates), POT (transport), json.loads and a
character-by-character scanner (parse). Peers that are not installed are left out. Times are processor time, the least
of several runs; machines differ and are busy, so read the ratios.
"""

from __future__ import annotations

import gc
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from time import process_time
from typing import Any

import numpy as np

from stage2_trainer.matching import GroundTruth, GTObject, build_target, match, parse_rollout, serialize_objects
from stage2_trainer.matching.assign import candidate_pairs
from stage2_trainer.matching.geometry import aabbs, mask_iou, points_of
from stage2_trainer.matching.options import DEFAULTS
from stage2_trainer.matching.transport import barycentric
from tests.unit.trainer.matching.test_scan import Plain
from tests.unit.trainer.matching.vocabularies import aligned_vocab

RUNS = 7
R = DEFAULTS.maskiou_resolution
TOKENS_PER_SECOND = 200  # one stream of a fast engine; the goal is 1 % of the time that generation takes


@dataclass(frozen=True)
class Row:
    """One comparison: seconds of ours and of the peer, and how far the results are apart."""

    what: str
    peer: str
    ours: float
    theirs: float
    difference: str

    def __str__(self) -> str:
        times = f"{self.ours * 1e3:9.2f} | {self.theirs * 1e3:9.2f} | {self.theirs / self.ours:8.2f}"
        return f"| {self.what:38} | {self.peer:34} | {times} | {self.difference} |"


def seconds(call: Callable[[], object], runs: int = RUNS) -> float:
    """The least time of several runs."""
    times = []
    for _ in range(runs):
        start = process_time()
        call()
        times.append(process_time() - start)
    return min(times)


def scene(count: int, polygons: float, seed: int = 0) -> tuple[list[GTObject], list[GTObject]]:
    """As many true objects, a share of them polygons, and a prediction near each one."""
    rng = np.random.default_rng(seed)
    truth = [_object(rng, rng.random() < polygons) for _ in range(count)]
    return [_near(one, rng) for one in truth], truth


def _object(rng: np.random.Generator, polygon: bool) -> GTObject:
    low, size = rng.integers(0, 850, 2), rng.integers(30, 140, 2)
    if not polygon:
        return GTObject("red box", "bbox", tuple(np.concatenate([low, low + size]).tolist()))
    angles = np.sort(rng.random(rng.integers(3, 13))) * 2 * np.pi
    points = low + size / 2 * (1 + np.stack([np.cos(angles), np.sin(angles)], axis=1))
    return GTObject("blue shape", "poly", tuple(points.astype(int).ravel().tolist()))


def _near(one: GTObject, rng: np.random.Generator) -> GTObject:
    moved = np.clip(np.array(one.bins) + rng.integers(-6, 7, len(one.bins)), 0, 999)
    return GTObject(one.desc, one.kind, tuple(moved.tolist()))


def mask_iou_rows() -> Iterator[Row]:
    """Ours against the peers on the candidate pairs of 100 x 100 and on all 10,000 pairs."""
    for kinds, share in (("boxes", 0.0), ("polygons", 1.0)):
        pred, gt = scene(100, share)
        for which, pairs in (
            ("candidates", candidate_pairs(aabbs(pred), aabbs(gt), DEFAULTS.candidate_top_k)),
            ("all pairs", np.stack(np.divmod(np.arange(10_000), 100), axis=1)),
        ):
            what = f"mask IoU, 100 x 100 {kinds}, {which}"
            found = mask_iou(pred, gt, pairs, resolution=R)
            ours = seconds(lambda: mask_iou(pred, gt, pairs, resolution=R))  # noqa: B023 called at once
            for peer, call in mask_iou_peers(pred, gt, pairs):
                theirs = np.asarray(call())
                yield Row(what, peer, ours, seconds(call, 2), f"{np.abs(theirs - found).max():.2g}")


def mask_iou_peers(
    pred: list[GTObject], gt: list[GTObject], pairs: np.ndarray
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls that return the IoU of each pair."""
    outlines = [[(points_of(one) * (R / 1000)).ravel().tolist() for one in side] for side in (pred, gt)]
    coco = installed("pycocotools.mask")
    if coco:

        def one_by_one() -> list[float]:
            return [
                coco.iou(coco.frPyObjects([outlines[0][i]], R, R), coco.frPyObjects([outlines[1][j]], R, R), [0])[0, 0]
                for i, j in pairs
            ]

        def drawn_once() -> np.ndarray:
            left, right = (coco.frPyObjects(side, R, R) for side in outlines)
            return coco.iou(left, right, [0] * len(right))[tuple(pairs.T)]

        yield "pycocotools, pair by pair", one_by_one
        yield "pycocotools, each mask drawn once", drawn_once
    shapely = installed("shapely")
    if shapely:

        def overlap() -> np.ndarray:
            left, right = (shapely.make_valid([shapely.Polygon(points_of(one)) for one in side]) for side in (pred, gt))
            a, b = left[pairs[:, 0]], right[pairs[:, 1]]
            shared = shapely.area(shapely.intersection(a, b))
            return shared / (shapely.area(a) + shapely.area(b) - shared)

        yield "shapely (continuous, no canvas)", overlap


def candidate_rows() -> Iterator[Row]:
    """Candidate search against the double loop."""
    for count in (100, 300):
        pred, gt = (aabbs(side) for side in scene(count, 0.5))
        found = candidate_pairs(pred, gt, 10)
        loop = looped_candidates(pred.tolist(), gt.tolist(), 10)
        ours = seconds(lambda: candidate_pairs(pred, gt, 10))  # noqa: B023 called at once
        theirs = seconds(lambda: looped_candidates(pred.tolist(), gt.tolist(), 10), 2)  # noqa: B023 called at once
        difference = "0" if loop == found.tolist() else "differs"
        yield Row(f"candidates, {count} x {count}", "plain double loop", ours, theirs, difference)


def looped_candidates(pred: list[list[int]], gt: list[list[int]], top_k: int) -> list[list[int]]:
    """The candidate rule as one would write it without numpy."""
    pairs = []
    for i, (a0, b0, a1, b1) in enumerate(pred):
        ranked = []
        for j, (c0, d0, c1, d1) in enumerate(gt):
            shared = max(0, min(a1, c1) - max(a0, c0)) * max(0, min(b1, d1) - max(b0, d0))
            union = (a1 - a0) * (b1 - b0) + (c1 - c0) * (d1 - d0) - shared
            apart = (a0 + a1 - c0 - c1) ** 2 + (b0 + b1 - d0 - d1) ** 2
            ranked.append((-shared / union if shared > 0 else apart, j))
        pairs += [[i, j] for _, j in sorted(ranked)[:top_k]]
    return pairs


def transport_rows() -> Iterator[Row]:
    """All pairs of one answer at once against POT pair by pair."""
    ot = installed("ot")
    if not ot:
        return
    pred, gt = scene(100, 1.0)
    x, y = ([points_of(one).astype(float) for one in side] for side in (pred, gt))
    epsilon = np.full(len(x), 10.0)

    def theirs() -> list[np.ndarray]:
        moved = []
        for one, other in zip(x, y, strict=True):
            # POT updates the columns first, ours the rows: transposed, both do the same rounds.
            cost = np.linalg.norm(other[:, None] - one[None], axis=-1)
            a, b = np.full(len(other), 1 / len(other)), np.full(len(one), 1 / len(one))
            plan = ot.sinkhorn(a, b, cost, 10.0, method="sinkhorn_log", numItermax=30, stopThr=0, warn=False).T
            moved.append(plan @ other / plan.sum(axis=1, keepdims=True))
        return moved

    found, expected = barycentric(x, y, epsilon), theirs()
    difference = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
    ours = seconds(lambda: barycentric(x, y, epsilon))
    yield Row("transport, 100 polygons, 30 rounds", "POT sinkhorn_log", ours, seconds(theirs, 2), f"{difference:.2g}")


def parse_rows() -> Iterator[Row]:
    """A dense answer of about 16,000 tokens."""
    vocab = aligned_vocab()
    truth = scene(680, 0.2)[1]
    text = serialize_objects(truth)
    ids = vocab.encode(text)
    parsed = parse_rollout(ids, vocab)
    same = [one.bins for one in parsed.valid_objects] == [one.bins for one in truth]
    what, ours = f"parse, {len(ids)} tokens", seconds(lambda: parse_rollout(ids, vocab))
    difference = "0" if same else "differs"
    yield Row(what, "the scan alone, by character", ours, seconds(lambda: Plain(text), 3), difference)
    yield Row(what, "json.loads alone (no tokens)", ours, seconds(lambda: json.loads(text)), difference)


def whole_step_rows() -> Iterator[Row]:
    """Parse, match, targets and tail together, against the time that generating the answer takes."""
    vocab = aligned_vocab()
    for count, share in ((100, 0.0), (100, 0.3), (300, 0.3)):
        pred, gt = scene(count, share)
        ids = vocab.encode(serialize_objects(pred))
        truth = GroundTruth(tuple(gt))
        name = f"{count} x {count}, {share:.0%} polygons"
        generation = len(ids) / TOKENS_PER_SECOND
        peer = f"generating {len(ids)} tokens, {TOKENS_PER_SECOND}/s"
        yield Row(f"E-step, {name}", peer, seconds(lambda: build_target(ids, truth, vocab)), generation, "-")  # noqa: B023 called at once
        coco = next(mask_iou_peers(pred, gt, np.stack(np.divmod(np.arange(count**2), count), axis=1)), None)
        if coco:
            ours = seconds(lambda: match(pred, gt))  # noqa: B023 called at once
            yield Row(f"match, {name}", "pycocotools IoU alone, all pairs", ours, seconds(coco[1], 1), "-")


def installed(module: str) -> Any:
    """The module, or None where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        return None


def main() -> None:
    """Print the table."""
    gc.disable()  # what the collector costs depends on all that is loaded, peers and tests included
    packages = [f"{name} {version(name)}" for name in ("numpy", "scipy", "pycocotools", "shapely", "POT")]
    print(f"Python {platform.python_version()}, {', '.join(packages)}, {platform.machine()}\n")
    print("| what | peer | ours ms | peer ms | ratio | largest difference |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for rows in (mask_iou_rows, candidate_rows, transport_rows, parse_rows, whole_step_rows):
        for row in rows():
            print(row, flush=True)


def version(name: str) -> str:
    """The installed version of a distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
