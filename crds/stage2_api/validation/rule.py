"""Rules that cross keys, told once for Python and once for the API server."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from stage2_api.validation import key_paths

M = TypeVar("M", bound=BaseModel)

SET = re.compile(r"\$\?\(([^),]+)\)")
VALUE = re.compile(r"\$\(([^),]+)(?:, ([^)]+))?\)")


def placeholders(text: str) -> tuple[str, ...]:
    """Return the keys that stand in a CEL expression as `$(a.b)`, `$(a.b, x)` or `$?(a.b)`."""
    return tuple(match[1] for pattern in (SET, VALUE) for match in pattern.finditer(text))


@dataclass(frozen=True)
class Rule(Generic[M]):
    """A rule that crosses keys, for Python and for the API server.

    path: the key to blame, dotted, as written in YAML, from the object that the rule is about.
    broken: whether an object breaks it.
    cel: the same rule for the API server, true where it is kept, in the notation of `validation.cel`; None where only
        Python can tell.
    reads: keys that `broken` reads besides those that stand in `cel`; `path` is one of them anyway.
    rule, way_out: as in Problem.
    """

    path: str
    broken: Callable[[M], bool]
    cel: str | None
    rule: str
    way_out: str
    reads: tuple[str, ...] = ()

    def keys_read(self) -> tuple[str, ...]:
        """Return the dotted paths of all keys that the rule looks at."""
        return (self.path, *self.reads, *placeholders(self.cel or ""))


def lifted(rules: Sequence[Rule[Any]], root: str, part: Callable[[Any], Any]) -> tuple[Rule[Any], ...]:
    """Return rules about a part of an object as rules about the object: `part` takes it out, `root` is its path."""

    def about_whole(rule: Rule[Any]) -> Rule[Any]:
        return Rule(
            path=key_paths.joined(root, rule.path),
            broken=lambda whole: rule.broken(part(whole)),
            cel=None,
            rule=rule.rule,
            way_out=rule.way_out,
            reads=tuple(key_paths.joined(root, path) for path in rule.keys_read()),
        )

    return tuple(map(about_whole, rules))
