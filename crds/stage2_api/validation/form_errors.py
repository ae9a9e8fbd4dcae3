"""Pydantic's errors as problems that a person can act on: path, value found, rule, way out."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from stage2_api.errors import Problem
from stage2_api.validation import key_paths

Located = Sequence[tuple[tuple[int | str, ...], ErrorDetails]]

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
}
_COMPARISONS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


def location(place: Sequence[int | str], raw: Any) -> tuple[int | str, ...]:
    """Return pydantic's location without the names that it gives to the branches of a union."""
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


def from_pydantic(
    model: type[BaseModel], located: Located, *, root: str = "", most: int = 100
) -> tuple[list[Problem], int]:
    """Return a problem for each of the first places that are wrong, in the order of the file, and how many more are.

    Branches of a union count as one. To describe one, all keys are looked through for what was meant.
    """
    by_path: dict[str, list[tuple[tuple[int | str, ...], ErrorDetails]]] = {}
    for place, error in located:
        by_path.setdefault(key_paths.joined(root, key_paths.dotted(place)), []).append((place, error))
    described = itertools.islice(by_path.items(), most)
    return [_problem(model, path, errors, root) for path, errors in described], max(len(by_path) - most, 0)


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
    kind = error["type"]
    if kind in _FORMS:
        return _FORMS[kind]
    for prefix, words in _COMPARISONS.items():
        if kind == prefix:
            return f"{words} {next(iter(context.values()))}"
    return _RULES[kind](context) if kind in _RULES else error["msg"]


_RULES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "literal_error": lambda context: (
        f"one of {_choices(context)}" if " or " in _choices(context) else _choices(context)
    ),
    "string_pattern_mismatch": lambda context: f"text of the form {context['pattern']}",
    "string_too_short": lambda context: f"text of at least {context['min_length']} characters",
    "string_too_long": lambda context: f"text of at most {context['max_length']} characters",
    "too_short": lambda context: f"at least {context['min_length']} items long",
    "too_long": lambda context: f"at most {context['max_length']} items long",
    "finite_number": lambda _: "a finite number",
}


def _choices(context: Mapping[str, Any]) -> str:
    return str(context["expected"]).replace("True", "true").replace("False", "false")


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
    if error["type"] in ("int_type", "float_type") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return _as_number(value)
    if isinstance(value, bool) and error["type"] in ("int_type", "float_type", "string_type"):
        return f"write a value instead of {str(value).lower()}, or remove the key"
    if default is None or isinstance(default, BaseModel):
        return f"change it: {_meaning(model, place)}"
    return f"change it, or remove the key (default {_yaml(default)})"


def _as_number(text: str) -> str:
    if "e" in text.lower() and "." not in text:
        mantissa, _, exponent = text.lower().partition("e")
        return f"write {mantissa}.0e{exponent}: YAML takes {text} for text"
    return f"write {text} without quotes"


def _instead_of_unknown(model: type[BaseModel], place: Sequence[int | str], value: object, root: str) -> str:
    near = key_paths.suggestion(model, place)
    if near is None:
        return _instead_of_section(model, place, value, root) or "remove it; docs/reference.md lists all keys"
    return f"did you mean {key_paths.joined(root, near)}? Otherwise remove it"


def _instead_of_section(model: type[BaseModel], place: Sequence[int | str], value: object, root: str) -> str | None:
    """Return where the keys of an unknown section belong; None where none of them is known."""
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
    return {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)
