"""A bound on how deep an object is nested, looked at before anything that calls itself for each level reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage2_api.errors import ConfigError, Problem

DEEPEST = 64
"""Levels of mappings and lists; a pod template with everything in it has fifteen."""
SHOWN = 6  # levels of the path that a problem names


def require_shallow(raw: Any, *, root: str = "") -> None:
    """Raise ConfigError where mappings and lists are nested deeper than 64 levels; root: the path of `raw`."""
    level: list[tuple[str, Any]] = [(root, raw)]
    for depth in range(DEEPEST + 1):
        below = [child for path, value in level for child in _children(path, value, named=depth < SHOWN)]
        # once each: YAML's aliases let few lines stand for more values than memory holds
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
