"""Kubernetes quantities ("500m", "16Gi", 2) as numbers, so that amounts can be compared and added."""

import re
from collections.abc import Mapping
from typing import Any

Amounts = Mapping[str, float]  # by resource name, in base units

_SUFFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "Ki": 2**10, "M": 1e6, "Mi": 2**20, "G": 1e9, "Gi": 2**30,
             "T": 1e12, "Ti": 2**40, "P": 1e15, "Pi": 2**50, "E": 1e18, "Ei": 2**60}  # fmt: skip
_FORM = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([eE][+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i))?")
_MOST = 1e300  # sums of more may be infinite


def parse(value: Any) -> float | None:
    """Return the amount in base units (cores, bytes, pieces); None if `value` is no quantity or has no finite sum."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        form = _FORM.fullmatch(str(value))
    except ValueError:  # a number of more digits than Python writes
        return None
    if form is None:
        return None
    number, exponent, suffix = form.groups()
    amount = float(number + (exponent or "")) * _SUFFIXES.get(suffix, 1)
    return amount if abs(amount) <= _MOST else None


def shown(resource: str, amount: float) -> str:
    """Return the amount as a person writes it: `3`, `0.5`, `12.5Gi` of memory."""
    if resource in ("memory", "ephemeral-storage"):
        return f"{amount / 2**30:.4g}Gi"
    return f"{amount:.6g}"
