"""Structural schemas, as Kubernetes demands them, from pydantic models.

Pydantic writes JSON Schema with references, `anyOf` and `const`; a structural schema has none of them (Kubernetes
documentation: CustomResourceDefinition, "Specifying a structural schema").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from stage2_api.base import KubernetesObject
from stage2_api.keys import models_in

Schema = dict[str, Any]

OVERRIDE = "x-stage2-schema"
"""Key of a field's own JSON schema that replaces what pydantic would say where a structural schema cannot say it."""

_DROPPED = ("$defs", "title", "additionalProperties", "propertyNames", OVERRIDE)
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of a model: no references, descriptions on one line with the default at their end.

    Defaults become part of the schema where the API server shall fill them in: in the Kubernetes part of an object. The
    training YAML keeps the form in which it was pasted.
    """
    whole = model.model_json_schema(by_alias=True, mode="validation")
    return _Walk(whole.get("$defs", {}), _filled_models(model)).node(whole, filled=issubclass(model, KubernetesObject))


def _filled_models(model: type[BaseModel]) -> set[str]:
    """The names of all models under `model` whose defaults the API server fills in."""
    found: set[str] = set()
    for info in model.model_fields.values():
        for inside in models_in(info.annotation):
            found |= _filled_models(inside) | ({inside.__name__} if issubclass(inside, KubernetesObject) else set())
    return found


class _Walk:
    """One pass over a JSON schema of pydantic's."""

    def __init__(self, definitions: Mapping[str, Schema], filled: set[str]) -> None:
        self._definitions = definitions
        self._filled = filled

    def node(self, raw: Mapping[str, Any], *, filled: bool) -> Schema:
        """The structural form of one node. `filled`: whether defaults below it go into the schema."""
        raw, nullable, name = self._flat(raw)
        filled = name in self._filled if name else filled
        if OVERRIDE in raw:
            kept = {key: raw[key] for key in ("description", "default") if key in raw}
            raw = {**raw[OVERRIDE], **kept}
        result = {key: value for key, value in raw.items() if key not in _DROPPED}
        for exclusive, bound in _BOUNDS.items():
            if exclusive in result:
                result[bound], result[exclusive] = result[exclusive], True
        if "const" in result:
            result["enum"] = [result.pop("const")]
        if nullable:
            result["nullable"] = True
        if "properties" in result:
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

    def _flat(self, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool, str | None]:
        """A node without reference and without the branch for null; whether there was one; the model referred to."""
        nullable, name = False, None
        while "$ref" in raw or ("anyOf" in raw and OVERRIDE not in raw):
            if "$ref" in raw:
                name = raw["$ref"].rpartition("/")[2]
                raw = {**self._definitions[name], **{key: value for key, value in raw.items() if key != "$ref"}}
                continue
            branches = [branch for branch in raw["anyOf"] if branch != {"type": "null"}]
            nullable = nullable or len(branches) < len(raw["anyOf"])
            if len(branches) != 1:
                raise ValueError(f"a structural schema has no place for a choice of types: {raw}")
            raw = {**branches[0], **{key: value for key, value in raw.items() if key != "anyOf"}}
        if OVERRIDE in raw and {"type": "null"} in raw.get("anyOf", ()):
            nullable = True
        return raw, nullable, name


def _text(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return '""' if default == "" else str(default)
