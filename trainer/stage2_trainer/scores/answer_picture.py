"""Outlines of the true and the answered objects of an image, in the colors of their verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from stage2_trainer.data.drawing import Outline
from stage2_trainer.matching import GTObject
from stage2_trainer.scores.image_counts import Verdict, verdicts
from stage2_trainer.scores.scored_image import ScoredImage

TRUE = "#1a7f37"
COLORS: dict[Verdict, str] = {
    "right": TRUE, "misnamed": "#bc4c00", "duplicate": "#8250df", "wrong": "#cf222e", "unjudged": "#57606a",
}  # fmt: skip


def true_outlines(objects: Sequence[GTObject]) -> list[Outline]:
    """Return the outlines of true objects."""
    return [Outline(one.kind, one.bins, one.desc, TRUE) for one in objects]


def answered_outlines(image: ScoredImage) -> list[Outline]:
    """Return the outlines of an answer's objects."""
    objects = zip(image.answer.objects, verdicts(image).answered, strict=True)
    return [Outline(one.kind, one.bins, one.desc, COLORS[verdict]) for one, verdict in objects]
