"""The tree of keys that a model describes: the field at a path, and suggestions for misspelt keys."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_CONFIG = "spec.config."


def joined(root: str, path: str) -> str:
    """Return two dotted paths as one; either may be empty."""
    return f"{root}.{path}" if root and path else root or path


def dotted(place: Sequence[int | str]) -> str:
    """Return a location as people write it: `servers[1].base_url`."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by their keys in YAML."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models inside a type: `X`, `X | None`, `list[X]`."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def model_at(model: type[BaseModel], place: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the model of the section at `place`; None for a plain value or a free mapping."""
    if all(isinstance(part, int) for part in place):
        return model
    info = field_at(model, place)
    return next(models_in(info.annotation), None) if info else None


def field_at(model: type[BaseModel], place: Sequence[int | str]) -> FieldInfo | None:
    """Return the field at `place`; for a list item, or a key of a free mapping, the field that holds it."""
    here: type[BaseModel] | None = model
    info: FieldInfo | None = None
    for part in place:
        if isinstance(part, int):
            continue
        if here is None:
            break
        info = fields(here).get(part)
        if info is None:
            return None
        here = next(models_in(info.annotation), None)
    return info


def leaves(model: type[BaseModel], root: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys under a model, sections before their keys."""
    for key, info in fields(model).items():
        path = joined(root, key)
        yield path
        for inside in models_in(info.annotation):
            yield from leaves(inside, path)


def suggestion(model: type[BaseModel], place: Sequence[int | str]) -> str | None:
    """Return the known key that was probably meant at `place`: a namesake elsewhere, or else a similar sibling."""
    section = model_at(model, place[:-1])
    near = difflib.get_close_matches(str(place[-1]), fields(section) if section else (), n=1, cutoff=0.6)
    return namesake(model, place) or (joined(dotted(place[:-1]), near[0]) if near else None)


def namesake(model: type[BaseModel], place: Sequence[int | str]) -> str | None:
    """Return the path of the only other key with the name of the last part of `place`; None for none or several.

    Keys in the same half of a job (the training YAML or its surroundings) come first.
    """
    everywhere = _by_name(model).get(place[-1], [])
    in_config = dotted(place).startswith(_CONFIG)
    near = [path for path in everywhere if path.startswith(_CONFIG) == in_config]
    return next((paths[0] for paths in (near, everywhere) if len(paths) == 1), None)


@functools.cache
def _by_name(model: type[BaseModel]) -> dict[object, list[str]]:
    """Return the paths of all keys under a model by their last part."""
    named: dict[object, list[str]] = {}
    for path in leaves(model):
        named.setdefault(path.rpartition(".")[2], []).append(path)
    return named


def value_at(parsed: BaseModel, raw: Mapping[str, Any], path: str) -> object:
    """Return the value at a dotted path: as written, or else the default; None if there is neither."""
    written: Any = raw
    for part in path.split(".") if path else ():
        written = written.get(part) if isinstance(written, Mapping) else None
    value = parsed_at(parsed, path)
    return written if written is not None else None if isinstance(value, BaseModel) else value


def parsed_at(parsed: BaseModel, path: str) -> object:
    """Return the value at a dotted path of an object; None where there is none."""
    value: object = parsed
    for part in path.split(".") if path else ():
        model_fields = type(value).model_fields if isinstance(value, BaseModel) else {}
        names = {info.alias or name: name for name, info in model_fields.items()}
        value = getattr(value, names[part]) if part in names else None
    return value


def stand_in(model: type[BaseModel], place: Sequence[int | str]) -> object:
    """Return a placeholder for a missing required key, so that the rest can still be checked."""
    info = field_at(model, place)
    annotation = info.annotation if info else None
    section = next(models_in(annotation), None)
    if section is not None:
        return placeholder(section)
    return 1 if annotation is int else "x"


def placeholder(model: type[BaseModel]) -> dict[str, Any]:
    """Return a mapping with a stand-in for every required key of a model."""
    return {key: stand_in(model, (key,)) for key, info in fields(model).items() if info.is_required()}
