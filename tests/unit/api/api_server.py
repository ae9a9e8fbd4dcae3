"""The API server's view of a job: schema defaults, and CEL rules as evaluated by Google's library."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from stage2_api.crd import custom_resource_definition

cel = pytest.importorskip("cel_expr_python.cel", reason="has no build for this machine")
ext_optional = pytest.importorskip("cel_expr_python.ext.ext_optional")
ext_strings = pytest.importorskip("cel_expr_python.ext.ext_strings")

SCHEMA: dict[str, Any] = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC: dict[str, Any] = SCHEMA["properties"]["spec"]


def defaulted(schema: Mapping[str, Any], value: Any) -> Any:
    """Return a value with the schema's defaults filled in, as the API server stores it."""
    if isinstance(value, list) and "items" in schema:
        return [defaulted(schema["items"], item) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    missing = {k: s["default"] for k, s in schema["properties"].items() if "default" in s and k not in value}
    return {k: defaulted(schema["properties"].get(k, {}), item) for k, item in {**value, **missing}.items()}


@functools.cache
def _program(expression: str) -> Any:
    return _environment("self", "oldSelf").compile(expression)


def _environment(*names: str) -> Any:
    """Return CEL with the API server's libraries and these variables."""
    extensions = [ext_optional.ExtOptional(), ext_strings.ExtStrings()]
    return cel.NewEnv(variables=dict.fromkeys(names, cel.Type.DYN), extensions=extensions)


def holds(expression: str, this: Any, old: Any = None) -> bool:
    """Tell whether a rule holds for an object, or for a change of it; fails where it ends in an error."""
    verdict = _program(expression).eval(data={"self": this, "oldSelf": old}).value()
    assert isinstance(verdict, bool), f"{expression}: {verdict}"
    return verdict


def admitted(policy: Mapping[str, Any], this: Any, old: Any = None, *, subresource: str = "") -> str:
    """Return why a ValidatingAdmissionPolicy refuses an object, or a change of an old one; empty where it takes it.

    It takes unseen what one of its match conditions leaves out.
    """
    request = {"subResource": subresource} if subresource else {}  # the API server leaves an empty one out
    seen: dict[str, Any] = {"object": this, "oldObject": old, "request": request, "variables": {}}
    if not all(_verdict(one["expression"], seen) for one in policy["spec"].get("matchConditions", [])):
        return ""
    for variable in policy["spec"].get("variables", []):
        seen["variables"][variable["name"]] = _evaluated(variable["expression"], seen)
    return "\n".join(
        str(_evaluated(entry["messageExpression"], seen)) if "message" not in entry else entry["message"]
        for entry in policy["spec"]["validations"]
        if not _verdict(entry["expression"], seen)
    )


def _verdict(expression: str, seen: Mapping[str, Any]) -> bool:
    found = _evaluated(expression, seen)
    assert isinstance(found, bool), f"{expression}: {found}"
    return found


@functools.cache
def _of_policy(expression: str) -> Any:
    return _environment("object", "oldObject", "request", "variables").compile(expression)


def _evaluated(expression: str, seen: Mapping[str, Any]) -> Any:
    return _plain(_of_policy(expression).eval(data=dict(seen)).value())


def _plain(value: Any) -> Any:
    """Return a value of CEL's as one of Python's, so that it can be handed to CEL again."""
    if isinstance(value, list):
        return [_plain(item.value()) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item.value()) for key, item in value.items()}
    return value
