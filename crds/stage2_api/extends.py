"""`extends`: a training YAML that builds on others.

Source: semantics section 3: `extends: str | list`, relative to the file; earlier bases lose; cycles are errors.
Mappings merge key by key; anything else, lists too, is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem

Read = Callable[[Path], Mapping[str, Any]]


def resolve_extends(path: Path, read: Read) -> dict[str, Any]:
    """Return the mapping in the file `path` merged over those that it extends, without the key `extends`.

    read: turns a file into a mapping (YAML is not this package's business).

    Raises:
        ConfigError: files extend each other in a circle, or `extends` is neither text nor a list of texts.
    """
    return _resolve(path, read, ())


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `over` on top of `base`: mappings merge key by key, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _resolve(path: Path, read: Read, above: tuple[Path, ...]) -> dict[str, Any]:
    here = path.resolve()
    if here in above:
        way_round = " → ".join(file.name for file in (*above[above.index(here) :], here))
        raise ConfigError([Problem("extends", way_round, "files must not extend each other in a circle", "remove one")])
    own = dict(read(path))
    result: dict[str, Any] = {}
    for base in _bases(own.pop("extends", [])):
        result = merged(result, _resolve(path.parent / base, read, (*above, here)))
    return merged(result, own)


def _bases(extends: object) -> list[str]:
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        way_out = "write one path or a list of paths, relative to this file"
        raise ConfigError([Problem("extends", extends, "must be a path or a list of paths", way_out)])
    return bases
