"""The whole E-step of one answer (parse, match, targets, tail) against the time that generating the answer takes."""

from __future__ import annotations

from collections.abc import Iterator

from bench.scenes import scene
from bench.tables import Row, Table, seconds

from stage2_trainer.matching import GroundTruth, build_target, serialize_objects
from tests.unit.trainer.matching.vocabularies import aligned_vocab

TOKENS_PER_SECOND = 200  # one stream of a fast engine; the goal is 1 % of that time, a ratio of 100


def rows() -> Iterator[Row]:
    """100 and 300 objects, without and with polygons."""
    vocab = aligned_vocab()
    for count, share in ((100, 0.0), (100, 0.3), (300, 0.3), (300, 1.0)):
        pred, gt = scene(count, share)
        ids, truth = vocab.encode(serialize_objects(pred)), GroundTruth(tuple(gt))
        what = f"{count} x {count}, {share:.0%} polygons"
        generation = f"generating {len(ids)} tokens at {TOKENS_PER_SECOND}/s"
        ours = seconds(lambda: build_target(ids, truth, vocab))  # noqa: B023 called at once
        yield Row(what, generation, ours, len(ids) / TOKENS_PER_SECOND)


TABLE = Table("E-step", "ms", 1e3, rows)
