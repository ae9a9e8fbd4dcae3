"""The images that are held out of a data set that has no validation part."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from stage2_trainer.prepare.annotated_image import AnnotatedImage

SHARE = 0.05
MOST = 1000
RULE = f"{SHARE:.0%} of the images, at least 1 and at most {MOST:,}: those whose ids have the smallest SHA-256"


def held_out(images: Sequence[AnnotatedImage]) -> frozenset[str]:
    """Return the ids of the images that are held out: the same ones in whatever order the images come."""
    count = min(max(1, round(len(images) * SHARE)), MOST)
    return frozenset(sorted((image.sample_id for image in images), key=_draw)[:count])


def _draw(sample_id: str) -> str:
    return hashlib.sha256(sample_id.encode()).hexdigest()
