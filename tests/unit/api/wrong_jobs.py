"""The table of wrong job files, for all checkers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stage2_api.errors import ConfigError, Problem

_TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Mistake:
    """One wrong job file; the fields are explained in mistakes.yaml."""

    name: str
    patch: dict[str, Any]
    path: str
    rule: str
    apply: str | None = None

    @property
    def job(self) -> dict[str, Any]:
        """The whole wrong job."""
        return merge_patch(good_job(), self.patch)


def good_job() -> dict[str, Any]:
    """The job that every mistake is a patch of."""
    return merge_patch({}, _TABLE["good"])


def mistakes() -> list[Mistake]:
    """All mistakes of the table."""
    return [Mistake(**entry) for entry in _TABLE["mistakes"]]


def merge_patch(target: Any, patch: Any) -> Any:
    """`target` with a JSON merge patch applied (RFC 7396); neither is changed."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def patched(raw: Any, *patches: Any) -> Any:
    """`raw` with merge patches applied in order."""
    for patch in patches:
        raw = merge_patch(raw, patch)
    return raw


def problems_of(parse: Callable[..., object], raw: Any, **options: Any) -> tuple[Problem, ...]:
    """The problems that a parser finds in `raw`; none if it is valid."""
    try:
        parse(raw, **options)
    except ConfigError as error:
        return error.problems
    return ()
