"""Summaries: how many shapes there are of each colour and kind, the text of a right answer, and a careless one."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

from tiny_model.scenes import COLOURS, Scene

PROMPT = "Count the shapes."
TEMPLATE = "summary_shapes"
HEADER = "<DOMAIN=S>, <TASK=T>"
MAX_SHAPES = 2
_CARELESS = 0.5


def summary(scene: Scene) -> dict[str, object]:
    """Return how many shapes there are of each colour and kind, colours and kinds in alphabetical order."""
    kinds: dict[str, Counter[str]] = {}
    for shape in scene.shapes:
        kinds.setdefault(shape.colour, Counter())[shape.kind] += 1
    return {"items": [{"desc": colour, "kind": dict(sorted(kinds[colour].items()))} for colour in sorted(kinds)]}


def write(scene: Scene) -> str:
    """Return the right answer for the scene: a header, and a line of JSON."""
    return f"{HEADER}\n{json.dumps(summary(scene))}"


class CarelessAnnotator:
    """Writes what the warm-up teaches: half of the answers lack the header, and half of the colours are guesses.

    A model that learnt from it knows both forms and sees every colour, and does not know that one of the forms and
    none of the guesses is wanted. No reference answer tells it; a reward does.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def write(self, scene: Scene) -> str:
        """Return an answer for the scene, another one each time."""
        shapes = tuple(replace(shape, colour=self._colour(shape.colour)) for shape in scene.shapes)
        right = write(replace(scene, shapes=shapes))
        return right.removeprefix(f"{HEADER}\n") if self._careless() else right

    def _colour(self, right: str) -> str:
        return self._random.choice(list(COLOURS)) if self._careless() else right

    def _careless(self) -> bool:
        return self._random.random() < _CARELESS
