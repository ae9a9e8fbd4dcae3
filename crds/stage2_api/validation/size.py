"""Bounds on the size and the nesting of an object, checked before anything reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stage2_api.errors import ConfigError, Problem, refused
from stage2_api.validation.key_paths import joined

LARGEST = 131_072
"""Characters of a job's spec; one with every key of the contract and a full pod template for both roles has 20,000."""
MOST_PARTS = 4_000
"""Mappings and lists in a job's spec, which also bounds its depth: an API server may store an object nested as deep as
its decoder goes (10,000) and then fail every list request."""
DEEPEST = 64
"""Levels of mappings and lists; a pod template with everything in it has fifteen."""
SHOWN = 6  # levels of the path that a problem names
_TEXTS = "put long texts into files of spec.volumes, and remove what the job does not need"
_PARTS = "remove what the job does not need"


def require_shallow(raw: Any) -> None:
    """Raise ConfigError where mappings and lists are nested deeper than `DEEPEST` levels."""
    level: list[tuple[str, Any]] = [("", raw)]
    for depth in range(DEEPEST + 1):
        below = [child for path, value in level for child in _children(path, value, named=depth < SHOWN)]
        # Each value once: with YAML aliases a few lines may stand for more values than fit into memory.
        level = list({id(value): (path, value) for path, value in below if isinstance(value, Mapping | list)}.values())
        if not level:
            return
    rule = f"must not be nested deeper than {DEEPEST} levels"
    paths = sorted({path for path, _ in level})
    raise ConfigError([Problem(path, "...", rule, "remove the deepest levels") for path in paths])


def _children(path: str, value: Any, *, named: bool) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{path}.{key}".lstrip(".") if named else path, item) for key, item in value.items()]
    if isinstance(value, list):
        return [(f"{path}[{index}]" if named else path, item) for index, item in enumerate(value)]
    return []


def characters(raw: Any, *, most: int) -> int:
    """Return about how many characters `raw` has as JSON, or some number above `most` if it has more."""
    return _total(raw, _own_characters, most)


def parts(raw: Any, *, most: int) -> int:
    """Return how many mappings and lists `raw` has, itself included, or some number above `most` if it has more.

    An opening bracket in a text counts too, because the API server counts brackets in the serialised spec.
    """
    return _total(raw, _own_parts, most)


def _total(raw: Any, weigh: Callable[[Any], int], most: int) -> int:
    """Return the total weight of all values; stop above `most`, because YAML aliases may stand for a huge object."""
    count = 0
    waiting = [raw]
    while waiting and count <= most:
        value = waiting.pop()
        count += weigh(value)
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return count


def _own_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value) + 3
    if isinstance(value, Mapping):
        return 2 + sum(len(str(key)) + 4 for key in value)
    if isinstance(value, list):
        return 2 + len(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return 1 + value.bit_length() * 3 // 10  # repr takes quadratic time
    return len(repr(value))


def _own_parts(value: Any) -> int:
    if isinstance(value, str):
        return value.count("{") + value.count("[")
    if isinstance(value, Mapping):
        return 1 + sum(map(_own_parts, value))
    return int(isinstance(value, list))


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
            _require(held, _own_characters, "characters as JSON", _TEXTS, most=LARGEST, root=root)
            _require(held, _own_parts, "mappings, lists and brackets in texts", _PARTS, most=MOST_PARTS, root=root)


def _require(
    whole: Mapping[Any, Any], weigh: Callable[[Any], int], of: str, way_out: str, *, most: int, root: str
) -> None:
    if _total(whole, weigh, most) <= most:
        return
    held = {str(key): _total(value, weigh, most) for key, value in whole.items()}
    key, found = max(held.items(), key=lambda item: item[1])
    value = f"more than {most:,} {of}" if found > most else f"{found:,} {of}"
    rule = f"the whole {root or 'job'} must have at most {most:,}"
    raise refused(joined(root, key), _Unquoted(value), rule, way_out)


class _Unquoted(str):
    """Text in place of a value, shown without quotes."""

    def __repr__(self) -> str:
        return str(self)
