"""YAML in which a value that has a reason carries it as a comment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

_WIDTH = 118
_STEP = 2


@dataclass(frozen=True)
class Chosen:
    """A value, and why it is this one."""

    value: Any
    why: str


class _OneLine(yaml.SafeDumper):
    """Writes text with what breaks a line in quotes and with escapes: elsewhere a reader makes spaces of some."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_OneLine.add_representer(str, _text)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Return nested mappings as YAML; lists and mappings inside a Chosen stand in one line."""
    return "".join(f"{line}\n" for line in _lines(tree, 0))


def _lines(tree: Mapping[str, Any], indent: int) -> Iterator[str]:
    margin = " " * indent
    for key, value in tree.items():
        if isinstance(value, Chosen):
            yield from _with_reason(f"{margin}{key}: {_inline(value.value)}", value.why, margin)
        elif isinstance(value, Mapping) and value:
            yield f"{margin}{key}:"
            yield from _lines(value, indent + _STEP)
        elif isinstance(value, list) and value:
            yield f"{margin}{key}:"
            yield from (f"{margin}  - {_inline(item)}" for item in value)
        else:
            yield f"{margin}{key}: {_inline(value)}"


def _with_reason(line: str, why: str, margin: str) -> Iterator[str]:
    if len(line) + len(why) + 3 <= _WIDTH:
        yield f"{line} # {why}"
        return
    yield f"{margin}# {why}"
    yield line


def _inline(value: Any) -> str:
    """Return a value as YAML in one line."""
    text: str = yaml.dump(
        value, Dumper=_OneLine, default_flow_style=True, width=2**20, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
