"""Rules in CEL, the language in which an API server checks them.

Keys are written as placeholders, so that a rule is as short as it reads and no default is written twice: `$(a.b)`
stands for the value of the key a.b or its default, `$(a.b, x)` for its value or x, `$?(a.b)` for whether it is set.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from stage2_api.validation import key_paths
from stage2_api.validation.rule import SET, VALUE, Rule


def validations(model: type[BaseModel], rules: Sequence[Rule[Any]]) -> list[dict[str, str]]:
    """Return `x-kubernetes-validations` for the schema of `model`: one entry for each rule that CEL can tell."""
    return [
        {"rule": expression(model, rule.cel), "message": f"{rule.rule}; {rule.way_out}", "fieldPath": f".{rule.path}"}
        for rule in rules
        if rule.cel is not None
    ]


def expression(model: type[BaseModel], text: str) -> str:
    """Return the CEL expression that `text` with its placeholders stands for; `self` is an object of `model`."""
    with_set = SET.sub(lambda match: f"{_chain(match[1])}.hasValue()", text)
    return VALUE.sub(lambda match: f"{_chain(match[1])}.orValue({match[2] or _default(model, match[1])})", with_set)


def _chain(path: str) -> str:
    return "self" + "".join(f".?{part}" for part in path.split("."))


def _default(model: type[BaseModel], path: str) -> str:
    """Return the default of a key as a CEL literal."""
    info = key_paths.field_at(model, path.split("."))
    if info is None or info.is_required() or info.default is None:
        raise LookupError(f"{path} has no default to put into a rule; write $({path}, DEFAULT)")
    return json.dumps(info.default)
