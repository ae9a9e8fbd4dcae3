"""A bound on how much an object holds, looked at before anything reads all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage2_api.errors import ConfigError, Problem

LARGEST = 131_072
"""Characters of a job's spec; one with every key of the contract and a full pod template for both roles has 20,000."""
_OF_A_NUMBER = 4


def characters(raw: Any, *, most: int) -> int:
    """Return about how many characters `raw` has as JSON, numbers taken for 4; some number above `most` if it has more.

    What lies beyond `most` is not looked at: the time is bounded, also for YAML's aliases, whatever they stand for.
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
            count += _OF_A_NUMBER
    return count


def require_small(spec: Any, *, root: str) -> None:
    """Raise ConfigError where a job's spec holds too much; it names the key that holds most."""
    if not isinstance(spec, Mapping) or characters(spec, most=LARGEST) <= LARGEST:
        return
    held = {str(key): characters(value, most=LARGEST) for key, value in spec.items()}
    key, count = max(held.items(), key=lambda item: item[1])
    value = f"more than {LARGEST:,} characters" if count > LARGEST else f"about {count:,} characters"
    rule = f"must, with the rest of the spec, have at most {LARGEST:,} characters as JSON"
    way_out = "put long texts into files of spec.volumes, and take out what the job does not need"
    raise ConfigError([Problem(f"{root}.{key}", _Told(value), rule, way_out)])


class _Told(str):
    """Words in the place of a value: without quotes."""

    def __repr__(self) -> str:
        return str(self)
