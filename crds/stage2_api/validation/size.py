"""Bounds on the size and the nesting of an object, checked before anything reads all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from stage2_api.errors import ConfigError, Problem
from stage2_api.validation.key_paths import joined

LARGEST = 131_072
"""Characters of a job's spec; one with every key of the contract and a full pod template for both roles has 20,000."""
MOST_PARTS = 4_000
"""Mappings and lists in a job's spec, and with that its depth: of one that is nested as deep as its decoder goes
(10,000), an API server may store what it cannot list again, for anybody."""
DEEPEST = 64
"""Levels of mappings and lists; a pod template with everything in it has fifteen."""
SHOWN = 6  # levels of the path that a problem names
_TEXTS = "put long texts into files of spec.volumes, and take out what the job does not need"
_PARTS = "take out what the job does not need"


def require_shallow(raw: Any, *, root: str = "") -> None:
    """Raise ConfigError where mappings and lists are nested deeper than `DEEPEST` levels; root: the path of `raw`."""
    level: list[tuple[str, Any]] = [(root, raw)]
    for depth in range(DEEPEST + 1):
        below = [child for path, value in level for child in _children(path, value, named=depth < SHOWN)]
        # Each value once: with YAML aliases a few lines may stand for more values than fit into memory.
        level = list({id(value): (path, value) for path, value in below if isinstance(value, Mapping | list)}.values())
        if not level:
            return
    rule = f"must not be nested deeper than {DEEPEST} levels"
    paths = sorted({path for path, _ in level})
    raise ConfigError([Problem(path, "...", rule, "take out what lies so deep") for path in paths])


def _children(path: str, value: Any, *, named: bool) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{path}.{key}".lstrip(".") if named else path, item) for key, item in value.items()]
    if isinstance(value, list):
        return [(f"{path}[{index}]" if named else path, item) for index, item in enumerate(value)]
    return []


def characters(raw: Any, *, most: int) -> int:
    """Return about how many characters `raw` has as JSON, or some number above `most` if it has more.

    It stops counting at `most`, so that its time is bounded, even where YAML aliases stand for a huge object.
    """
    count = 0
    waiting = [raw]
    while waiting and count <= most:
        value = waiting.pop()
        if isinstance(value, str):
            count += len(value) + 3
        elif isinstance(value, Mapping):
            count += 2 + sum(len(str(key)) + 4 for key in value)
            waiting.extend(value.values())
        elif isinstance(value, list):
            count += 2 + len(value)
            waiting.extend(value)
        else:
            count += _width(value)
    return count


def parts(raw: Any, *, most: int) -> int:
    """Return how many mappings and lists `raw` has, itself included, or some number above `most` if there are more.

    An opening bracket in a text counts too, because the API server counts brackets in the serialised spec.
    """
    count = 0
    waiting = [raw]
    while waiting and count <= most:
        value = waiting.pop()
        if isinstance(value, str):
            count += value.count("{") + value.count("[")
        elif isinstance(value, Mapping):
            count += 1
            waiting.extend((*value, *value.values()))
        elif isinstance(value, list):
            count += 1
            waiting.extend(value)
    return count


def _width(value: Any) -> int:
    """Return about how many characters a number, a boolean or null has, in a bounded time."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 1 + value.bit_length() * 3 // 10
    return len(repr(value))


def written_by_its_author(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job without metadata, which the API server bounds, and status, which the controller writes."""
    return {key: value for key, value in raw.items() if key not in ("metadata", "status")}


def require_small(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the largest key, where a job's spec is too large, or the keys beside the spec are.

    Each is counted separately: the API server counts the spec, and a valid job has almost nothing beside it.
    """
    beside = written_by_its_author(raw)
    spec = beside.pop("spec", None)
    for root, held in (("spec", spec), ("", beside)):
        if isinstance(held, Mapping):
            _require(held, characters, "characters as JSON", _TEXTS, most=LARGEST, root=root)
            _require(held, parts, "mappings, lists and brackets in texts", _PARTS, most=MOST_PARTS, root=root)


class _Count(Protocol):
    def __call__(self, raw: Any, *, most: int) -> int: ...


def _require(whole: Mapping[Any, Any], count: _Count, of: str, way_out: str, *, most: int, root: str) -> None:
    if count(whole, most=most) <= most:
        return
    held = {str(key): count(value, most=most) for key, value in whole.items()}
    key, found = max(held.items(), key=lambda item: item[1])
    value = f"more than {most:,} {of}" if found > most else f"{found:,} {of}"
    rule = f"the whole {root or 'job'} must have at most {most:,}"
    raise ConfigError([Problem(joined(root, key), _Unquoted(value), rule, way_out)])


class _Unquoted(str):
    """Words in place of a value, shown without quotes."""

    def __repr__(self) -> str:
        return str(self)
