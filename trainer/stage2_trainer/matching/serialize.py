"""The assistant's text: one line of JSON with coordinate tokens. Source: semantics, sections 2 and 4.6."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from stage2_api.coordinates import coord_token
from stage2_trainer.matching.errors import MatchingError
from stage2_trainer.matching.ground_truth import GTObject

_DESC_VALUE = re.compile(r'"desc": "((?:[^"\\]++|\\.)*+)"', re.DOTALL)


def serialize_objects(objects: Sequence[GTObject], start_index: int = 1) -> str:
    """Return the whole answer, `{"object_1": {...}, ...}`; polygons as lists of pairs."""
    return "{" + object_entries(objects, start_index) + "}"


def object_entries(objects: Sequence[GTObject], start_index: int) -> str:
    """Return the entries alone, `"object_n": {...}` joined by `", "`, n counting from `start_index`."""
    return ", ".join(
        f'"object_{index}": {json.dumps(_value(one), ensure_ascii=False)}'
        for index, one in enumerate(objects, start_index)
    )


def append_text(prefix_text: str, objects: Sequence[GTObject], start_index: int) -> str:
    """Return the text after a prefix: missed objects, then one `}`. Raise MatchingError where nothing can follow."""
    last = prefix_text.rstrip()[-1:]
    if last not in ("{", ",", "}"):
        raise MatchingError(
            f"prefix ends in {last!r}; it must end in '{{', ',' or '}}'; cut it after its last closed object"
        )
    if last == "," and not objects:
        raise MatchingError("prefix ends in ',' and no object follows; cut the comma off")
    comma = ", " if last == "}" and objects else ""
    return comma + object_entries(objects, start_index) + "}"


def desc_value_spans(text: str) -> list[tuple[int, int]]:
    """Return the places of all `"desc"` values in a serialised text, quotes excluded (characters, end exclusive)."""
    return [match.span(1) for match in _DESC_VALUE.finditer(text)]


def _value(one: GTObject) -> dict[str, Any]:
    tokens = [coord_token(k) for k in one.bins]
    if one.kind == "bbox":
        return {"desc": one.desc, "bbox_2d": tokens}
    return {"desc": one.desc, "poly": [list(pair) for pair in zip(tokens[::2], tokens[1::2], strict=True)]}
