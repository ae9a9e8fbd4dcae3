"""Validation that finds every mistake in one pass: pydantic's errors of form, and broken rules."""

from __future__ import annotations

import copy
import difflib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stage2_api.errors import ConfigError, Problem
from stage2_api.validation import cel, key_paths

_FORMS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "at least {min_length} items long",
    "too_long": "at most {max_length} items long",
}
"""What must hold, by the type of pydantic's error."""

_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_WITH_SIGNS = re.compile(r"[-+]?[0-9]+([_:.][0-9]+)+")  # 1_000, 12:30:45
Location = tuple[int | str, ...]
Located = Sequence[tuple[Location, ErrorDetails]]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Rule(Generic[M]):
    """A rule between keys, for Python and for the API server.

    path: the dotted key to blame, relative to the object.
    rule, way_out: as in Problem.
    cel: true where the rule is kept; None if only Python can check it.
    breaks: whether an object breaks the rule, for what `cel.holds` cannot evaluate; None: `cel` decides.
    reads: keys that `breaks` reads besides `path` and those in `cel`.
    """

    path: str
    rule: str
    way_out: str
    cel: str | None = None
    breaks: Callable[[M], bool] | None = None
    reads: tuple[str, ...] = ()

    def broken(self, parsed: M) -> bool:
        """Return whether an object breaks the rule."""
        if self.breaks is not None:
            return self.breaks(parsed)
        assert self.cel is not None, f"a rule of {self.path} has neither CEL nor Python"
        return not cel.holds(self.cel, parsed)

    def keys_read(self) -> tuple[str, ...]:
        """Return the dotted paths of all keys that the rule reads."""
        return (self.path, *self.reads, *cel.placeholders(self.cel or ""))


def lifted(rules: Sequence[Rule[Any]], root: str, part: Callable[[Any], Any]) -> tuple[Rule[Any], ...]:
    """Turn rules about a part of an object into rules about the object. part: returns the part; root: its path."""

    def about_whole(rule: Rule[Any]) -> Rule[Any]:
        return Rule(
            path=key_paths.joined(root, rule.path),
            breaks=lambda whole: rule.broken(part(whole)),
            rule=rule.rule,
            way_out=rule.way_out,
            reads=tuple(key_paths.joined(root, path) for path in rule.keys_read()),
        )

    return tuple(map(about_whole, rules))


_DESCRIBED = 100  # wrong places
_ROUNDS = 8  # repairs may reveal new errors: a section that was missing has required keys


def validate(model: type[M], raw: Mapping[str, Any], rules: Sequence[Rule[M]], *, root: str = "") -> M:
    """Return the object that `raw` describes. root: prefix of the problems' paths.

    Raises:
        ConfigError: with every problem, not only the first.
    """
    parsed, found = form_of(model, raw, root=root)
    if parsed is not None:
        wrong = [problem.path for problem in found]
        checkable = [rule for rule in rules if not _reads_any(rule, wrong, root)]
        found = [*found, *broken_rules(parsed, raw, checkable, root=root)]
    if found or parsed is None:
        raise ConfigError(found)
    return parsed


def unknown_keys(model: type[BaseModel], raw: Mapping[str, Any]) -> list[Location]:
    """Return the places of the keys in `raw` that no section of the model has."""
    try:
        model.model_validate(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        return [location(item["loc"], raw) for item in errors if item["type"] == "extra_forbidden"]
    return []


def form_of(model: type[M], raw: Mapping[str, Any], *, root: str = "") -> tuple[M | None, list[Problem]]:
    """Return the object with errors of form repaired, or None if that fails, and the errors.

    Raises:
        ConfigError: there are too many errors to read.
    """
    repaired = copy.deepcopy(raw)
    found: list[Problem] = []
    for attempt in range(_ROUNDS):
        try:
            return model.model_validate(repaired), found
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=True)
        located = [(location(item["loc"], repaired), item) for item in errors]
        new, unlisted = from_pydantic(model, located, root)
        if unlisted:  # probably not a file for stage2
            raise ConfigError(new, unlisted=unlisted)
        known = [problem.path for problem in found]
        found += [problem for problem in new if attempt == 0 or not _overlaps(problem.path, known)]
        for place, item in located:
            repaired = _repaired(model, repaired, place, missing=item["type"] == "missing")
    return None, found


def broken_rules(parsed: M, raw: Mapping[str, Any], rules: Sequence[Rule[M]], *, root: str = "") -> list[Problem]:
    """Return the rules that `parsed` breaks, with the values in `raw` or their defaults."""
    return [
        Problem(key_paths.joined(root, rule.path), key_paths.value_at(parsed, raw, rule.path), rule.rule, rule.way_out)
        for rule in rules
        if rule.broken(parsed)
    ]


def _reads_any(rule: Rule[Any], wrong: Sequence[str], root: str) -> bool:
    """Return whether a rule reads a key with an error of form: it would judge the repaired value, not the written."""
    return any(_overlaps(key_paths.joined(root, path), wrong) for path in rule.keys_read())


def _overlaps(path: str, others: Sequence[str]) -> bool:
    """Return whether a path equals, contains or is contained in one of the others."""
    return any(_is_below(path, other) or _is_below(other, path) for other in others)


def _is_below(path: str, other: str) -> bool:
    return path == other or path.startswith((f"{other}.", f"{other}["))


def _repaired(model: type[BaseModel], raw: Any, place: Location, *, missing: bool) -> Any:
    """Return `raw` without the wrong value at `place`, or with a placeholder for a missing one."""
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


def location(place: Sequence[int | str], raw: Any) -> Location:
    """Return pydantic's location without the names of union branches."""
    kept: list[int | str] = []
    here = raw
    for index, part in enumerate(place):
        if isinstance(here, Mapping) and (part in here or (index == len(place) - 1 and isinstance(part, str))):
            kept.append(part)
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            kept.append(part)
            here = here[part] if part < len(here) else None
    return tuple(kept)


def from_pydantic(model: type[BaseModel], located: Located, root: str) -> tuple[list[Problem], int]:
    """Return a problem for each of the first wrong places, in the order of the file, and the number of the rest.

    Branches of a union count as one. Describing a problem is slow, because it searches all keys for a suggestion.
    """
    by_path: dict[str, list[tuple[Location, ErrorDetails]]] = {}
    for place, error in located:
        by_path.setdefault(key_paths.joined(root, key_paths.dotted(place)), []).append((place, error))
    described = itertools.islice(by_path.items(), _DESCRIBED)
    return [_problem(model, path, errors, root) for path, errors in described], max(len(by_path) - _DESCRIBED, 0)


def _problem(model: type[BaseModel], path: str, errors: Located, root: str) -> Problem:
    place, error = errors[0]
    if error["type"] == "extra_forbidden":
        return Problem(
            path, error["input"], _unknown(model, place), _instead_of_unknown(model, place, error["input"], root)
        )
    if error["type"] == "missing":
        return Problem(path, None, "is required", _instead_of_nothing(model, place, root))
    rule = " or ".join(dict.fromkeys(_rule(item) for _, item in errors))
    return Problem(path, error["input"], f"must be {rule}", _way_out(model, place, error))


def _unknown(model: type[BaseModel], place: Sequence[int | str]) -> str:
    section = key_paths.model_at(model, place[:-1])
    if section is None or not getattr(section, "lists_its_keys", False):
        return "is not a key of stage2"
    return f"is not a key of this section, which takes {', '.join(key_paths.fields(section))}"


def _rule(error: ErrorDetails) -> str:
    """Return what must hold, without the path: "at least 1"."""
    context = error.get("ctx", {})
    if error["type"] == "literal_error":
        choices = str(context["expected"]).replace("True", "true").replace("False", "false")
        return f"one of {choices}" if " or " in choices else choices
    form = _FORMS.get(error["type"])
    return form.format(**context) if form else error["msg"]


def _way_out(model: type[BaseModel], place: Sequence[int | str], error: ErrorDetails) -> str:
    value = error["input"]
    choices = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    info = key_paths.field_at(model, place)
    default = (
        None
        if info is None or info.is_required() or isinstance(place[-1], int)
        else info.get_default(call_default_factory=True)
    )
    if near:
        return f"did you mean {near[0]!r}?"
    if error["type"] in ("int_type", "float_type") and isinstance(value, str) and (as_number := _as_number(value)):
        return as_number
    if isinstance(value, bool) and error["type"] in ("int_type", "float_type", "string_type"):
        return f"write a value instead of {str(value).lower()}, or remove the key"
    if default is None or isinstance(default, BaseModel):
        return f"change it: {_meaning(model, place)}"
    return f"change it, or remove the key (default {_yaml(default)})"


def _as_number(text: str) -> str | None:
    """Return how to write a text as the number that it looks like; None if it looks like none."""
    if not _NUMBER.fullmatch(text):
        return f"write plain digits: YAML reads {text} as text" if _WITH_SIGNS.fullmatch(text) else None
    if not math.isfinite(float(text)):
        return "write a smaller number"
    if "e" in text.lower() and "." not in text:
        mantissa, _, exponent = text.lower().partition("e")
        return f"write {mantissa}.0e{exponent}: YAML reads {text} as text"
    return f"write {text} without quotes"


def _instead_of_unknown(model: type[BaseModel], place: Sequence[int | str], value: object, root: str) -> str:
    near = key_paths.suggestion(model, place)
    if near is None:
        return _instead_of_section(model, place, value, root) or "remove it; docs/reference.md lists all keys"
    return f"did you mean {key_paths.joined(root, near)}? Otherwise remove it"


def _instead_of_section(model: type[BaseModel], place: Sequence[int | str], value: object, root: str) -> str | None:
    """Return where the keys of an unknown section belong; None if none of them is known."""
    if not isinstance(value, Mapping):
        return None
    homes = {key: key_paths.namesake(model, (*place, str(key))) for key in value}
    known = [f"{key} belongs to {key_paths.joined(root, home)}" for key, home in homes.items() if home]
    return f"remove it; {', '.join(known)}" if known else None


def _instead_of_nothing(model: type[BaseModel], place: Sequence[int | str], root: str) -> str:
    section = key_paths.model_at(model, place)
    if section is None:
        return f"set it: {_meaning(model, place)}"
    needed = [key_paths.joined(root, key_paths.dotted((*place, key))) for key in key_paths.placeholder(section)]
    return f"write the section with at least {' and '.join(needed)}" if needed else "write the section"


def _meaning(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """Return the first sentence of a key's description, in lower case."""
    info = key_paths.field_at(model, place)
    if info is None or not info.description:
        return "docs/reference.md lists all keys"
    sentence = " ".join(re.split(r"(?<=[.:]) |\n\n", info.description, maxsplit=1)[0].split()).rstrip(".:")
    return sentence[:1].lower() + sentence[1:]


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
