"""JSON as the API server speaks it, read and written by orjson: half of the standard library's time, a tenth to write.

What orjson does not take (objects nested deeper than it follows, halves of surrogate pairs) the standard library does:
whatever anybody may store must be read.
"""

import json
from typing import Any

import orjson


def read(text: bytes | str) -> Any:
    """Return what a text says. Raise ValueError if it is no JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def written(made: object) -> bytes:
    """Return an object of plain dictionaries, lists, texts and numbers as JSON, without spaces."""
    try:
        return orjson.dumps(made)
    except orjson.JSONEncodeError:
        return json.dumps(made, separators=(",", ":")).encode()
