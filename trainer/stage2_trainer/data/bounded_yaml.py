"""Untrusted YAML, read with bounds on its size, depth and expanded aliases.

A few lines can expand to more values than memory holds, and recursive readers crash on deep nesting. So libyaml's flat
stream of events is counted before anything is built from it.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from stage2_api.validation.size import DEEPEST
from stage2_trainer.data.files import read_named

LARGEST_BYTES = 2 << 20  # more than the API server takes as one object
MERGE = "tag:yaml.org,2002:merge"
MOST_VALUES = 200_000  # keys, values and list items of a file; those of an anchor count again for each alias
TOO_DEEP = f"must not be nested deeper than {DEEPEST} levels"

_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, if PyYAML was built with it
_Base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class UnreadableYaml(ValueError):
    """Text that is not YAML, or exceeds a bound. Has what was found, the rule, and the way out."""

    def __init__(self, found: str, rule: str, way_out: str) -> None:
        super().__init__(f"{found}; {rule}; {way_out}")
        self.found, self.rule, self.way_out = found, rule, way_out


class _UniqueKeys:
    """A loader that refuses duplicate keys, of which plain YAML silently keeps the last."""

    def construct_mapping(self: Any, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _at("a mapping or list cannot be a key", key_node)
            if key in seen:
                raise _at(f"the key {key!r} is given twice; keep one of the two", key_node)
            seen.add(key)
        built: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)  # type: ignore[misc]
        return built


class _ValueLoader(_UniqueKeys, _Safe):  # type: ignore[misc]
    """Reads numbers, dates and truth values as such."""


class _TextLoader(_UniqueKeys, _Base):  # type: ignore[misc]
    """Leaves every scalar text: `010`, not 8."""


def _at(what: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def read_documents(path: Path, *, as_text: bool = False) -> list[Any]:
    """Return the documents of a YAML file that a person names, in order, without empty ones.

    as_text: every scalar, keys included, stays text: `010`, not 8. There is no merging by `<<` then.

    Raises:
        OSError: the file cannot be read, or is a device or a FIFO.
        UnreadableYaml: it is not text, not YAML, or exceeds a bound.
    """
    text = _text(path)
    try:
        _count(text)
        loader = _TextLoader if as_text else _ValueLoader
        return [document for document in yaml.load_all(text, loader) if document not in (None, "")]
    except UnreadableYaml:
        raise
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:  # PyYAML raises all of these
        raise UnreadableYaml(" ".join(str(error).split()), "the file must be YAML", "correct that line") from error


def _text(path: Path) -> str:
    content = read_named(path, LARGEST_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{content[error.start]:02x} at offset {error.start}"
        raise UnreadableYaml(found, "the file must be YAML, in UTF-8", "save it as UTF-8, or check the path") from error


def _count(text: str) -> None:
    """Raise UnreadableYaml if values are nested too deep, or too many with aliases expanded."""
    sizes: dict[str, int] = {}  # by anchor
    open_: list[tuple[str | None, int]] = [(None, 0)]  # anchor and size so far, from the document inwards
    for event in yaml.parse(text, Loader=_Safe):
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
            _add(open_, size)
            if anchor is not None:
                sizes[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor or "", 0)
            _require(size > 0, f"*{event.anchor}", "an alias must name what ends before it", event)
            _add(open_, size)
        elif isinstance(event, yaml.ScalarEvent):
            _add(open_, 1)
            if event.anchor is not None:
                sizes[event.anchor] = 1
        depth, values = len(open_) - 1, open_[-1][1]
        _require(depth <= DEEPEST, f"{depth} levels", TOO_DEEP, event)
        _require(values <= MOST_VALUES, f"{values} values", f"must not hold more than {MOST_VALUES} values", event)


def _add(open_: list[tuple[str | None, int]], size: int) -> None:
    anchor, so_far = open_[-1]
    open_[-1] = (anchor, so_far + size)


def _require(kept: bool, found: str, rule: str, event: yaml.Event) -> None:
    if not kept:
        line = event.start_mark.line + 1 if event.start_mark else 1
        raise _too_much(f"{found} in line {line}", rule)


def _too_much(found: str, rule: str) -> UnreadableYaml:
    return UnreadableYaml(found, rule, "shorten the file")
