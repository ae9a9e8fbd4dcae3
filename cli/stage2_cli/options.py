"""Options that several commands share: a dataclass declares them once, and a command takes it as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of a command's dataclasses as parameters of the command, each in its dataclass's place.

    A field is declared as a parameter is, with Annotated. The command is called with the dataclasses made of them.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    groups = {name: _fields(one.annotation) for name, one in parameters.items() if is_dataclass(one.annotation)}

    @wraps(command)
    def spread_out(**given: Any) -> None:
        made = {
            name: parameters[name].annotation(**{field.name: given.pop(field.name) for field in fields})
            for name, fields in groups.items()
        }
        command(**given, **made)

    shown = [field for name, one in parameters.items() for field in groups.get(name, [one])]
    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in shown]
    vars(spread_out)["__signature__"] = inspect.Signature(keywords)  # which typer reads in place of `**given`
    return spread_out


def _fields(group: Any) -> list[inspect.Parameter]:
    """Return the parameters of a dataclass, with the types that its module's names stand for."""
    types = get_type_hints(group, include_extras=True)
    return [one.replace(annotation=types[name]) for name, one in inspect.signature(group).parameters.items()]
