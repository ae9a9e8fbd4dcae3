"""Parsing a dense answer against a scanner that goes character by character, and against json.loads."""

from __future__ import annotations

import json
from collections.abc import Iterator

from bench.scenes import scene
from bench.tables import Row, Table, seconds

from stage2_trainer.matching import parse_rollout, serialize_objects
from tests.unit.trainer.matching.test_scan import Plain
from tests.unit.trainer.matching.vocabularies import aligned_vocab

OBJECTS = 610


def rows() -> Iterator[Row]:
    """An answer of about 16,000 tokens; both peers know nothing of tokens and do only a part of the work."""
    vocab = aligned_vocab()
    truth = scene(OBJECTS, 0.2)[1]
    text = serialize_objects(truth)
    ids = vocab.encode(text)
    parsed = parse_rollout(ids, vocab)
    difference = "0" if [one.bins for one in parsed.valid_objects] == [one.bins for one in truth] else "differs"
    what, ours = f"{len(ids)} tokens, {len(text)} characters", seconds(lambda: parse_rollout(ids, vocab))
    yield Row(what, "the scan alone, character by character", ours, seconds(lambda: Plain(text)), difference)
    yield Row(what, "json.loads of the same text", ours, seconds(lambda: json.loads(text)), difference)


TABLE = Table("Parse", "ms", 1e3, rows)
