"""Ground truth of one record, in bins. Source: semantics, sections 2 and 4.3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from stage2_api.coordinates import MAX_BIN, coord_bin
from stage2_trainer.matching.parse import (
    BLANK_DESC,
    KIND_OF_KEY,
    NO_OBJECT_VALUE,
    NOT_ONE_GEOMETRY,
    WRONG_COUNT,
    Kind,
)
from stage2_trainer.matching.scan import OBJECT_KEY

MIXED_COORDINATES = "tokens_and_numbers_mixed"
NOT_COORDINATES = "coordinates_are_no_bins"


@dataclass(frozen=True)
class GTObject:
    """One true object: its description, its kind, and its bins (4 for a bbox, x and y in turn for a poly)."""

    desc: str
    kind: Kind
    bins: tuple[int, ...]


@dataclass(frozen=True)
class GroundTruth:
    """The true objects of one record in the order of their indices, and what was left out: (key, reason)."""

    objects: tuple[GTObject, ...]
    dropped: tuple[tuple[str, str], ...] = ()


def ground_truth(payload: Mapping[str, Any]) -> GroundTruth:
    """Read an assistant payload: `object_{i}` to `{desc, bbox_2d | poly}`, coordinates as tokens or as numbers in bins.

    Objects that break the contract are left out and listed; keys of another form are no objects.
    """
    keys = sorted((int(match[1]), key) for key in payload if (match := OBJECT_KEY.fullmatch(key)))
    objects: list[GTObject] = []
    dropped: list[tuple[str, str]] = []
    for _, key in keys:
        found = _object(payload[key])
        if isinstance(found, str):
            dropped.append((key, found))
        else:
            objects.append(found)
    return GroundTruth(tuple(objects), tuple(dropped))


def _object(value: Any) -> GTObject | str:
    """The object, or the reason why it is none."""
    if not isinstance(value, Mapping):
        return NO_OBJECT_VALUE
    desc = value.get("desc")
    if not isinstance(desc, str) or not desc.strip():
        return BLANK_DESC
    geometry = [key for key in KIND_OF_KEY if value.get(key) is not None]
    if len(geometry) != 1:
        return NOT_ONE_GEOMETRY
    kind = KIND_OF_KEY[geometry[0]]
    bins = _bins(value[geometry[0]])
    if isinstance(bins, str):
        return bins
    if len(bins) != 4 if kind == "bbox" else len(bins) < 6 or len(bins) % 2:
        return WRONG_COUNT
    return GTObject(desc, kind, bins)


def _bins(value: Any) -> tuple[int, ...] | str:
    """The bins of a flat or paired list of coordinates, or the reason why they are none."""
    if not isinstance(value, (list, tuple)):
        return NOT_COORDINATES
    if value and all(isinstance(pair, (list, tuple)) for pair in value):
        value = list(chain.from_iterable(value))
    if len({isinstance(one, str) for one in value}) > 1:
        return MIXED_COORDINATES
    bins = [_bin(one) for one in value]
    known = tuple(one for one in bins if one is not None)
    return known if len(known) == len(bins) else NOT_COORDINATES


def _bin(value: Any) -> int | None:
    if isinstance(value, str):
        return coord_bin(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    rounded = round(value)
    return rounded if 0 <= rounded <= MAX_BIN else None
