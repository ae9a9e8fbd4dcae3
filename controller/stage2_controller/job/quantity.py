"""Kubernetes quantities ("500m", "16Gi", 2) as numbers, so that amounts can be compared and added."""

from collections.abc import Mapping
from typing import Any

Amounts = Mapping[str, float]  # by resource name, in base units

_SUFFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "Ki": 2**10, "M": 1e6, "Mi": 2**20, "G": 1e9, "Gi": 2**30,
             "T": 1e12, "Ti": 2**40, "P": 1e15, "Pi": 2**50, "E": 1e18, "Ei": 2**60}  # fmt: skip
_BY_LENGTH = sorted(_SUFFIXES, key=len, reverse=True)


def parse(value: Any) -> float | None:
    """Return the amount in its base unit (cores, bytes, pieces); None if `value` is no quantity."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    text = str(value)
    suffix = next((s for s in _BY_LENGTH if text.endswith(s)), "")
    try:
        return float(text.removesuffix(suffix)) * _SUFFIXES.get(suffix, 1)
    except ValueError:
        return None


def shown(resource: str, amount: float) -> str:
    """Return the amount as a person writes it: `3`, `0.5`, `12.5Gi` of memory."""
    if resource in ("memory", "ephemeral-storage"):
        return f"{amount / 2**30:.4g}Gi"
    return f"{amount:.6g}"
