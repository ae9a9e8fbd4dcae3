"""Rules in CEL: as the API server evaluates them, and as Python does.

A rule refers to keys by placeholders, so that none repeats a default: `$(a.b)` is the value of a.b or its default,
`$(a.b, x)` its value or x, `$?(a.b)` whether it is set.
"""

from __future__ import annotations

import functools
import json
import re
from types import CodeType
from typing import Any

from pydantic import BaseModel

from stage2_api.validation import key_paths

_SET = re.compile(r"\$\?\(([^),]+)\)")
_VALUE = re.compile(r"\$\(([^),]+)(?:, ([^)]+))?\)")


def placeholders(text: str) -> tuple[str, ...]:
    """Return the keys in the placeholders of a rule."""
    return tuple(match[1] for pattern in (_SET, _VALUE) for match in pattern.finditer(text))


def expression(model: type[BaseModel], text: str) -> str:
    """Return a rule for the API server; `self` is an object of `model`."""
    with_set = _SET.sub(lambda match: f"{_chain(match[1])}.hasValue()", text)
    return _VALUE.sub(
        lambda match: f"{_chain(match[1])}.orValue({match[2] or json.dumps(_default(model, match[1]))})", with_set
    )


def _chain(path: str) -> str:
    return "self" + "".join(f".?{part}" for part in path.split("."))


def _default(model: type[BaseModel], path: str) -> Any:
    info = key_paths.field_at(model, path.split("."))
    if info is None or info.is_required() or info.default is None:
        raise LookupError(f"{path} has no default; write $({path}, DEFAULT)")
    return info.default


def holds(text: str, parsed: BaseModel) -> bool:
    """Return whether an object keeps a rule that has only placeholders, literals, operators and `size()`."""

    def value(path: str, default: Any = None) -> Any:
        found = key_paths.parsed_at(parsed, path)
        if found is not None:
            return found
        return _default(type(parsed), path) if default is None else default

    def is_set(path: str) -> bool:
        return key_paths.parsed_at(parsed, path) is not None

    return bool(eval(_in_python(text), {"value": value, "is_set": is_set}))


@functools.cache
def _in_python(text: str) -> CodeType:
    text = _SET.sub(r"is_set('\1')", text)
    text = _VALUE.sub(lambda match: f"value('{match[1]}'{f', {match[2]}' if match[2] else ''})", text)
    text = re.sub(r"(value\([^()]*\))\.size\(\)", r"len(\1)", text)
    text = re.sub(r"!(?!=)", " not ", text).replace("&&", "and").replace("||", "or")
    return compile(text.strip(), "rule", "eval")
