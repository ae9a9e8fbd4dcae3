"""Validation that finds everything in one pass: what is wrong in form, as pydantic tells, and rules that cross keys.

A rule that crosses keys needs a whole object. Where a key is wrong in form, the rules run over the object without that
key, and those that read it say nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from stage2_api.errors import ConfigError, Problem
from stage2_api.validation import form_errors, key_paths
from stage2_api.validation.rule import Rule

M = TypeVar("M", bound=BaseModel)
Location = tuple[int | str, ...]

_ROUNDS = 8  # how often a repaired object may show new problems of form: sections that were missing hold required keys


def validate(model: type[M], raw: Mapping[str, Any], rules: Sequence[Rule[M]], *, root: str = "") -> M:
    """Return the object that `raw` describes; `root` stands before the paths of problems.

    Raises:
        ConfigError: with every problem, not only the first.
    """
    parsed, found = form_of(model, raw, root=root)
    if parsed is not None:
        wrong = [problem.path for problem in found]
        answerable = [rule for rule in rules if not _reads_any(rule, wrong, root)]
        found = [*found, *broken_rules(parsed, raw, answerable, root=root)]
    if found or parsed is None:
        raise ConfigError(found)
    return parsed


def form_of(model: type[M], raw: Mapping[str, Any], *, root: str = "") -> tuple[M | None, list[Problem]]:
    """Return the object, repaired where its form is wrong, with the problems of form; None if it is beyond repair.

    Raises:
        ConfigError: where there are more problems than anybody reads.
    """
    repaired = copy.deepcopy(raw)
    found: list[Problem] = []
    for attempt in range(_ROUNDS):
        try:
            return model.model_validate(repaired), found
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=True)
        located = [(form_errors.location(item["loc"], repaired), item) for item in errors]
        new, unlisted = form_errors.from_pydantic(model, located, root=root)
        if unlisted:  # hardly a file of ours: what is wrong besides its form is not looked for
            raise ConfigError(new, unlisted=unlisted)
        told = {problem.path for problem in found}
        found += [problem for problem in new if attempt == 0 or not _about_told(problem.path, told)]
        for place, item in located:
            repaired = _repaired(model, repaired, place, missing=item["type"] == "missing")
    return None, found


def broken_rules(parsed: M, raw: Mapping[str, Any], rules: Sequence[Rule[M]], *, root: str = "") -> list[Problem]:
    """Return the rules that `parsed` breaks, with the values found in `raw` or their defaults."""
    return [
        Problem(key_paths.joined(root, rule.path), key_paths.found(parsed, raw, rule.path), rule.rule, rule.way_out)
        for rule in rules
        if rule.broken(parsed)
    ]


def _reads_any(rule: Rule[Any], wrong: Sequence[str], root: str) -> bool:
    """Tell whether a rule reads a key that is wrong in form: what it would say is about the repair, not the file."""
    read = [key_paths.joined(root, path) for path in rule.keys_read()]
    return any(_told(path, {other}) or _told(other, {path}) for path in read for other in wrong)


def _about_told(path: str, told: set[str]) -> bool:
    """Tell whether a problem was told of a key, or of a part of it or of its whole, for which it was taken out."""
    return _told(path, told) or any(_told(other, {path}) for other in told)


def _told(path: str, told: set[str]) -> bool:
    return any(path == other or path.startswith((f"{other}.", f"{other}[")) for other in told)


def _repaired(model: type[BaseModel], raw: Any, place: Location, *, missing: bool) -> Any:
    """Return `raw` without what is wrong at `place`, or with something that stands for what is missing there."""
    if not place or not isinstance(raw, Mapping):
        return key_paths.placeholder(model)
    cut = next((index for index, part in enumerate(place) if isinstance(part, int)), None)
    if cut is not None:
        place, missing = place[:cut], False
    parent: Any = raw
    for part in place[:-1]:
        parent = parent.get(part) if isinstance(parent, Mapping) else None
    if not isinstance(parent, dict):
        return raw
    if missing:
        parent[place[-1]] = key_paths.stand_in(model, place)
    else:
        parent.pop(place[-1], None)
    return raw
