"""The text that the model is to write for a scene, and the reading of what it wrote (semantics: data contract)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tiny_model.scenes import Scene

PROMPT = "List the shapes."
COORD_TOKENS = [f"<|coord_{k}|>" for k in range(1000)]
_COORD = re.compile(r"^<\|coord_(\d{1,3})\|>$")


@dataclass(frozen=True)
class Found:
    """One object of an answer: what it is called, its geometry's key and its coordinates in bins 0..999."""

    desc: str
    key: str
    bins: tuple[int, ...]

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Return the axis-aligned box (x1, y1, x2, y2) around it, in bins."""
        xs, ys = self.bins[0::2], self.bins[1::2]
        return min(xs), min(ys), max(xs), max(ys)


def truth(scene: Scene) -> list[Found]:
    """Return what is in the scene."""
    return [Found(desc, key, tuple(bins)) for desc, key, bins in scene.objects()]


def write(objects: Iterable[Found]) -> str:
    """Return the answer: one line of JSON, coordinates as coord tokens."""
    payload = {f"object_{n}": {"desc": o.desc, o.key: _tokens(o)} for n, o in enumerate(objects, start=1)}
    return json.dumps(payload, ensure_ascii=False)


def read(text: str) -> list[Found] | None:
    """Return the objects of an answer, or None when it is not the JSON that was asked for."""
    try:
        payload = json.loads(text)
        return [_object(value) for value in payload.values()]
    except (ValueError, AttributeError, KeyError, TypeError):
        return None


def _tokens(found: Found) -> list[str] | list[list[str]]:
    tokens = [COORD_TOKENS[k] for k in found.bins]
    if found.key == "bbox_2d":
        return tokens
    return [tokens[i : i + 2] for i in range(0, len(tokens), 2)]


def _object(value: dict[str, object]) -> Found:
    (key,) = set(value) - {"desc"}
    values = value[key]
    if not isinstance(value["desc"], str) or not isinstance(values, list):
        raise TypeError(value)
    flat = [part for item in values for part in (item if isinstance(item, list) else [item])]
    bins = tuple(_bin(token) for token in flat)
    if len(bins) != 4 if key == "bbox_2d" else (key != "poly" or len(bins) < 6 or len(bins) % 2):
        raise ValueError(value)
    return Found(value["desc"], key, bins)


def _bin(token: str) -> int:
    match = _COORD.match(token)
    if match is None:
        raise ValueError(token)
    return int(match.group(1))
