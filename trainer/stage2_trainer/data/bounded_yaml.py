"""Untrusted YAML, read with bounds on its size, depth and expanded aliases.

A few lines can expand to more values than memory holds, and recursive readers crash on deep nesting. So libyaml's flat
stream of events is counted before anything is built from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from stage2_api.errors import ConfigError, refused
from stage2_api.validation.size import DEEPEST
from stage2_trainer.data.files import read_named

LARGEST_BYTES = 2 << 20  # more than the API server takes as one object
MERGE = "tag:yaml.org,2002:merge"
LONGEST_NUMBER = 250  # characters; a float holds it in any base
MOST_VALUES = 200_000  # keys, values and list items of a file; those of an anchor count again for each alias

N = TypeVar("N", int, float)

_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, if PyYAML was built with it
_Base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


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
    """Reads numbers, dates and truth values as such.

    What is a number to YAML 1.1 alone stays text, which the reader of its field refuses by name: `12:30`, not 750, and
    `1_000`. So does a number that no float can hold.
    """

    def construct_yaml_int(self: Any, node: yaml.ScalarNode) -> int | str:
        """Return a whole number."""
        return _number(node.value, lambda: int(_Safe.construct_yaml_int(self, node)))

    def construct_yaml_float(self: Any, node: yaml.ScalarNode) -> float | str:
        """Return a number."""
        return _number(node.value, lambda: float(_Safe.construct_yaml_float(self, node)))


for _kind in ("int", "float"):
    _ValueLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", getattr(_ValueLoader, f"construct_yaml_{_kind}"))


def _number(text: str, built: Callable[[], N]) -> N | str:
    if len(text) > LONGEST_NUMBER or ":" in text or "_" in text:
        return text
    number = built()
    return text if math.isinf(number) and "inf" not in text.lower() else number


class _TextLoader(_UniqueKeys, _Base):  # type: ignore[misc]
    """Leaves every scalar text: `010`, not 8."""


def _at(what: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def read_documents(path: Path, *, as_text: bool = False) -> list[Any]:
    """Return the documents of a YAML file that a person names, in order, without empty ones.

    as_text: every scalar, keys included, stays text: `010`, not 8. There is no merging by `<<` then.

    Raises ConfigError if the file cannot be read, is a device or a FIFO, is not YAML, or exceeds a bound.
    """
    try:
        text = read_named(path, LARGEST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise refused(str(path), None, f"cannot be read ({error.strerror})", "check the path") from error
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        way_out = "save it as UTF-8, or check the path"
        raise refused(str(path), found, "the file must be YAML, in UTF-8", way_out) from error
    return parse_documents(text, path, as_text=as_text)


def parse_documents(text: str, source: object, *, as_text: bool = False) -> list[Any]:
    """Return the documents of a YAML text as `read_documents` does. source: where it is from, for messages."""
    try:
        _count(text, source)
        loader = _TextLoader if as_text else _ValueLoader
        return [document for document in yaml.load_all(text, loader) if document not in (None, "")]
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # PyYAML raises all of these
        raise refused(str(source), _place_and_problem(error), "must be YAML", "correct that line") from error


def _place_and_problem(error: Exception) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return " ".join(str(error).split())
    mark, start = error.problem_mark, error.context_mark
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    begun = (
        f" that began at line {start.line + 1}" if error.context and start and mark and start.line != mark.line else ""
    )
    return f"{error.problem}{where} {error.context or ''}{begun}".rstrip()


def _count(text: str, source: object) -> None:
    """Raise ConfigError if values are nested too deep, or too many with aliases expanded."""
    sizes: dict[str, int] = {}  # by anchor
    open_: list[tuple[str | None, int]] = [(None, 0)]  # anchor and size so far, from the document inwards

    def require(kept: bool, found: str, rule: str, event: yaml.Event) -> None:
        if not kept:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise refused(str(source), f"{found} in line {line}", rule, "shorten the file")

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
            require(size > 0, f"*{event.anchor}", "an alias must name what ends before it", event)
            _add(open_, size)
        elif isinstance(event, yaml.ScalarEvent):
            _add(open_, 1)
            if event.anchor is not None:
                sizes[event.anchor] = 1
        depth, values = len(open_) - 1, open_[-1][1]
        require(depth <= DEEPEST, f"{depth} levels", f"must not be nested deeper than {DEEPEST} levels", event)
        require(values <= MOST_VALUES, f"{values} values", f"must not hold more than {MOST_VALUES} values", event)


def _add(open_: list[tuple[str | None, int]], size: int) -> None:
    anchor, so_far = open_[-1]
    open_[-1] = (anchor, so_far + size)
