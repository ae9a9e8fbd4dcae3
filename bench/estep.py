"""The whole E-step of one answer (parse, match, targets, tail) beside the time that a busy server takes to generate it.

The server is one of `bench.schedule`: an 8B on an H100 that works on 256 answers at once. Its time is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.scenes import scene
from bench.slow_servers import MAX_RUNNING, STEP_S, STEP_S_PER_ANSWER
from bench.tables import Row, Table, seconds

from stage2_trainer.matching import GroundTruth, build_target, serialize_objects
from tests.unit.trainer.matching.vocabularies import aligned_vocab

TOKENS_PER_SECOND = MAX_RUNNING / (STEP_S + MAX_RUNNING * STEP_S_PER_ANSWER)


def rows() -> Iterator[Row]:
    """100 and 300 objects, without and with polygons."""
    vocab = aligned_vocab()
    for count, share in ((100, 0.0), (100, 0.3), (300, 0.3), (300, 1.0)):
        pred, gt = scene(count, share)
        ids, truth = vocab.encode(serialize_objects(pred)), GroundTruth(tuple(gt))
        what = f"{count} x {count}, {share:.0%} polygons"
        generation = f"{len(ids)} tokens of a server that generates {TOKENS_PER_SECOND:,.0f}/s"
        ours = seconds(lambda: build_target(ids, truth, vocab))  # noqa: B023 called at once
        yield Row(what, generation, ours, len(ids) / TOKENS_PER_SECOND)


TABLE = Table("E-step", "ms", 1e3, rows)
