"""Structural schemas, as Kubernetes demands them, from pydantic models.

Pydantic writes JSON Schema with references, `anyOf` and `const`; a structural schema has none of them (Kubernetes
documentation: CustomResourceDefinition, "Specifying a structural schema").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage2_api.section import Section
from stage2_api.validation.key_paths import models_in

Schema = dict[str, Any]

OVERRIDE = "x-stage2-schema"
"""Key of a field's own JSON schema that replaces what pydantic would say where a structural schema cannot say it."""

_DROPPED = ("$defs", "title", "additionalProperties", "propertyNames", OVERRIDE)
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def structural(model: type[Section], *, keeps_unknown: bool = False) -> Schema:
    """Return the structural schema of a model: no references; descriptions on one line, the default at their end.

    Defaults become part of the schema where `filled_in` says so. `keeps_unknown`: the API server stores keys that no
    section has, where it would drop them silently for clients that do not ask for strictness.
    """
    whole = model.model_json_schema(by_alias=True, mode="validation")
    walk = _Walk(whole.get("$defs", {}), _filled_models(model), keeps_unknown=keeps_unknown)
    return walk.node(whole, filled=model.filled_in)


def _filled_models(model: type[Section]) -> set[str]:
    """Return the names of all models under `model` whose defaults the API server fills in."""
    found: set[str] = set()
    for info in model.model_fields.values():
        for inside in _sections_in(info.annotation):
            found |= _filled_models(inside) | ({inside.__name__} if inside.filled_in else set())
    return found


def _sections_in(annotation: Any) -> list[type[Section]]:
    return [inside for inside in models_in(annotation) if issubclass(inside, Section)]


class _Walk:
    """One pass over a JSON schema of pydantic's."""

    def __init__(self, definitions: Mapping[str, Schema], filled: set[str], *, keeps_unknown: bool) -> None:
        self._keeps_unknown = keeps_unknown
        self._definitions = definitions
        self._filled = filled

    def node(self, raw: Mapping[str, Any], *, filled: bool) -> Schema:
        """Return the structural form of one node. `filled`: whether defaults below it go into the schema."""
        raw, name = self._flat(raw)
        filled = name in self._filled if name else filled
        if OVERRIDE in raw:
            kept = {key: raw[key] for key in ("description", "default") if key in raw}
            raw = {**raw[OVERRIDE], **kept}
        first = {key: raw[key] for key in ("type", "description") if key in raw}
        result = {**first, **{key: value for key, value in raw.items() if key not in _DROPPED}}
        for exclusive, bound in _BOUNDS.items():
            if exclusive in result:
                result[bound], result[exclusive] = result[exclusive], True
        if "const" in result:
            result["enum"] = [result.pop("const")]
        if "properties" in result:
            if self._keeps_unknown:
                result["x-kubernetes-preserve-unknown-fields"] = True
            result["properties"] = {
                key: self._property(value, required=key in result.get("required", ()), filled=filled)
                for key, value in result["properties"].items()
            }
        if "items" in result:
            result["items"] = self.node(result["items"], filled=filled)
        if isinstance(raw.get("additionalProperties"), Mapping):
            result["additionalProperties"] = self.node(raw["additionalProperties"], filled=filled)
        if "description" in result:
            result["description"] = " ".join(result["description"].split())
        return result

    def _property(self, raw: Mapping[str, Any], *, required: bool, filled: bool) -> Schema:
        result = self.node(raw, filled=filled)
        default = result.pop("default", None)
        section = "properties" in result
        if required:
            result["description"] += " Required."
        elif not section and default not in (None, {}, []):
            result["description"] += f" Default: {_text(default)}."
        if filled and section and default is not None:
            result["default"] = {}
        elif filled and not section and default not in (None, "", {}, []):
            result["default"] = default
        return result

    def _flat(self, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
        """Return a node without reference and without the branch for null; the name of the model referred to.

        Null is left out because the API server drops a null from a field that is not nullable, which is what null means
        in every key that takes it: unset.
        """
        name = None
        while "$ref" in raw or ("anyOf" in raw and OVERRIDE not in raw):
            if "$ref" in raw:
                name = raw["$ref"].rpartition("/")[2]
                raw = {**self._definitions[name], **_without(raw, "$ref")}
                continue
            branches = [branch for branch in raw["anyOf"] if branch != {"type": "null"}]
            if len(branches) != 1:
                raise ValueError(f"a structural schema has no place for a choice of types: {raw}")
            raw = {**branches[0], **_without(raw, "anyOf")}
        return raw, name


def _without(raw: Mapping[str, Any], key: str) -> Schema:
    return {name: value for name, value in raw.items() if name != key}


def _text(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return '""' if default == "" else str(default)
