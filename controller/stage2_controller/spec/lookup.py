"""A look into what people wrote, whatever its shape is."""

from collections.abc import Mapping
from typing import Any


def at(value: Any, *keys: str) -> Any:
    """Return what stands below these keys; None where a key is missing or anything but a mapping stands."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
