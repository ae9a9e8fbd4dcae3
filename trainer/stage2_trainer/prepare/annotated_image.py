"""An annotated image, in whatever format its annotations came, and what is left out of a data set and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Outline = Sequence[tuple[float, float]]
NAMED = 3


@dataclass(frozen=True)
class AnnotatedObject:
    """An object: its box (x1, y1, x2, y2) and the outlines of its parts, in pixels; no outlines where only a box is."""

    desc: str
    box: tuple[float, float, float, float]
    outlines: Sequence[Outline] = ()


@dataclass(frozen=True)
class AnnotatedImage:
    """An image with its objects. size: width and height that the annotations say; None where they say none."""

    sample_id: str
    path: Path
    size: tuple[int, int] | None
    objects: Sequence[AnnotatedObject]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Tally:
    """What was written, and what was left out: by reason how many, and the first few by name."""

    records: int = 0
    objects: int = 0
    images_left_out: Counter[str] = field(default_factory=Counter)
    objects_left_out: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def leave_out_image(self, reason: str, name: str) -> None:
        """Count an image that is not written."""
        self.images_left_out[reason] += 1
        self._name(reason, name)

    def leave_out_object(self, reason: str, name: str) -> None:
        """Count an object, or a part of one, that is not written."""
        self.objects_left_out[reason] += 1
        self._name(reason, name)

    def _name(self, reason: str, name: str) -> None:
        named = self.names.setdefault(reason, [])
        if len(named) < NAMED:
            named.append(name)
