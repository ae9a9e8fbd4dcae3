"""The tree of keys that a model describes: what stands at a path, and which key a misspelt one may have meant."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

STAND_IN_TEXT = "x"
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
    """Return the model of the section at `place`; None where a plain value or a free mapping stands."""
    here = model
    for part in place:
        if isinstance(part, int):
            continue
        info = fields(here).get(part)
        inside = next(models_in(info.annotation), None) if info else None
        if inside is None:
            return None
        here = inside
    return here


def field_at(model: type[BaseModel], place: Sequence[int | str]) -> FieldInfo | None:
    """Return the field at `place`, of whose value list items and items of free mappings are parts."""
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
    """Yield the dotted paths of all keys under a model, sections before what is in them."""
    for key, info in fields(model).items():
        path = joined(root, key)
        yield path
        for inside in models_in(info.annotation):
            yield from leaves(inside, path)


def suggestion(model: type[BaseModel], place: Sequence[int | str]) -> str | None:
    """Return the known key that a person may have meant at `place`, dotted; None where none is near.

    A key of the same name elsewhere comes first, then the most similar one beside it.
    """
    section = model_at(model, place[:-1])
    near = difflib.get_close_matches(str(place[-1]), fields(section) if section else (), n=1, cutoff=0.6)
    return namesake(model, place) or (joined(dotted(place[:-1]), near[0]) if near else None)


def namesake(model: type[BaseModel], place: Sequence[int | str]) -> str | None:
    """Return the path of the only other key called as the last part of `place`; None if there is none, or several.

    Keys of the same part of a job, the training YAML or what is around it, come first.
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
    """Return the value at a dotted path: as written, or the default that counts in its place; None where neither is."""
    written: Any = raw
    value: Any = parsed
    for part in path.split(".") if path else ():
        written = written.get(part) if isinstance(written, Mapping) else None
        names = (
            {info.alias or name: name for name, info in type(value).model_fields.items()} if _is_model(value) else {}
        )
        value = getattr(value, names[part]) if part in names else None
    return written if written is not None else None if _is_model(value) else value


def stand_in(model: type[BaseModel], place: Sequence[int | str]) -> object:
    """Return something valid in form for a missing key that is required, so that all else can still be looked at."""
    info = field_at(model, place)
    annotation = info.annotation if info else None
    section = next(models_in(annotation), None)
    if section is not None:
        return placeholder(section)
    return (
        {str: STAND_IN_TEXT, int: 1}.get(annotation, STAND_IN_TEXT) if isinstance(annotation, type) else STAND_IN_TEXT
    )


def placeholder(model: type[BaseModel]) -> dict[str, Any]:
    """Return a mapping with a stand-in for every required key of a model."""
    return {key: stand_in(model, (key,)) for key, info in fields(model).items() if info.is_required()}


def _is_model(value: object) -> bool:
    return isinstance(value, BaseModel)
