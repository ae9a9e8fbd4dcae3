"""The ValidatingAdmissionPolicy that refuses what a definition cannot; `crds/known-keys.yaml` holds it.

Keys that no section of a job has, nor the job beside its spec: the definition keeps them, so that none is lost
silently, and with that `kubectl apply` finds none by itself. And a spec that holds too much: what the definition leaves
free may be of any size and depth, and of an object that is nested as deep as its decoder goes an API server stores what
it cannot list again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stage2_api import job
from stage2_api.crd import Schema, structural
from stage2_api.validation import key_paths
from stage2_api.validation.size import LARGEST, MOST_PARTS

_SUMMANDS = 16  # parsers bound how deep an expression is nested, and a sum nests
_WRITTEN = "'%s'.format([{}.?spec.orValue({{}})])"
_PARTS = "variables.{0}.split('{{').size() + variables.{0}.split('[').size() - 2"  # and brackets in texts
_ROOT_KEYS = list(key_paths.fields(job.RolloutMatchingJob))
# A key that stays as it is does not count: whoever takes the last finalizer off an old job leaves its spec alone.
_IS_NEW = (
    "oldObject == null || object.spec != oldObject.spec"
    f" || object.exists(k, !(k in {_ROOT_KEYS}) && (!(k in oldObject) || object[k] != oldObject[k]))"
)
# `suspend: true` takes a few characters itself. Room for those in every edit would lead a row of edits past any bound.
_REST_STAYS = (
    "oldObject != null && object.?spec.orValue({{}}).all(k, k in {} || object.spec[?k] == oldObject.?spec[?k])"
)
_WAY_OUT = "not keys of stage2: correct or remove them; `kubectl explain rmj.spec --recursive` lists all keys"


def known_keys_policy() -> dict[str, Any]:
    """Return the policy as a mapping, ready to be written as YAML or JSON."""
    name = f"{job.PLURAL}.{job.GROUP}"
    rule = {
        "apiGroups": [job.GROUP],
        "apiVersions": [job.VERSION],
        "operations": ["CREATE", "UPDATE"],
        "resources": [job.PLURAL],
    }
    spec = structural(job.JobSpec)
    sections = list(_sections(spec))
    named = [f"variables.{variable}" for variable, _ in sections]
    every = " + ".join(
        f"({' + '.join(part)})"
        for part in (named[first : first + _SUMMANDS] for first in range(0, len(named), _SUMMANDS))
    )
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "matchConditions": [{"name": "the-spec-or-a-key-beside-it-is-new", "expression": _IS_NEW}],
            "variables": [
                *({"name": variable, "expression": expression} for variable, expression in sections),
                {"name": "unknown", "expression": every},
                # Written out, since only that is quick: to visit each value took an API server 23 s for 150 kB of them.
                {"name": "written", "expression": _WRITTEN.format("object")},
                {"name": "characters", "expression": "variables.written.size()"},
                {"name": "parts", "expression": _PARTS.format("written")},
                # What a job has it keeps, or one that is older than a bound could not even be suspended.
                {"name": "before", "expression": f"oldObject == null ? '' : {_WRITTEN.format('oldObject')}"},
                {"name": "characters_before", "expression": "variables.before.size()"},
                {"name": "parts_before", "expression": _PARTS.format("before")},
                {"name": "rest_stays", "expression": _REST_STAYS.format(_without_room(spec))},
            ],
            "validations": [
                _at_most(LARGEST, "characters", "characters", "put long texts into files of spec.volumes"),
                _at_most(
                    MOST_PARTS, "parts", "mappings, lists and brackets in texts", "take out what the job does not need"
                ),
                {
                    "expression": "variables.unknown.size() == 0",
                    "messageExpression": f"variables.unknown.join(', ') + ': {_WAY_OUT}'",
                },
            ],
        },
    }


def _at_most(most: int, count: str, of: str, way_out: str) -> dict[str, str]:
    rule = f" {of}; the whole spec must have at most {most:,}; {way_out}"
    held = f"variables.{count}"
    return {
        "expression": f"{held} <= {most} || {held} <= {held}_before || variables.rest_stays",
        "messageExpression": f"'spec: ' + string(variables.{count}) + '{rule}'",
    }


def _without_room(spec: Schema) -> list[str]:
    """Return the keys of the spec that hold a truth value or a bounded number, and so nothing else."""
    return [key for key, value in spec["properties"].items() if value["type"] in ("boolean", "integer")]


def _sections(spec: Schema) -> Iterator[tuple[str, str]]:
    """Yield a variable for each section: the paths of the keys in it that it does not have."""
    yield "root", f"object.filter(k, !(k in {_ROOT_KEYS}))"
    for path, schema in _below("spec", spec):
        steps = path.split(".")
        yield "_".join(part.removesuffix("[]") for part in steps), _unknown("object", steps, schema, "", 0)


def _below(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the sections under one, itself first; `[]` marks those of which there is a list."""
    yield path, schema
    for key, value in schema["properties"].items():
        inside = value.get("items", value)
        if "properties" in inside:
            yield from _below(f"{path}.{key}" + ("[]" if "items" in value else ""), inside)


def _unknown(parent: str, steps: list[str], schema: Schema, path: str, depth: int) -> str:
    """Return a CEL expression for the unknown keys of the section to which the steps lead from `parent`."""
    if not steps:
        return f"{parent}.filter(k, !(k in {sorted(schema['properties'])})).map(k, '{path}.' + k)"
    step, *rest = steps
    here, name, path = f"v{depth}", step.removesuffix("[]"), f"{path}.{step}".lstrip(".")
    if step.endswith("[]"):
        inside = _unknown(f"i{depth}", rest, schema, path, depth + 1)
        inside = f"{here}.exists(i{depth}, ({inside}).size() > 0) ? ['{'.'.join([path, *rest])}'] : []"
    else:
        inside = _unknown(here, rest, schema, path, depth + 1)
    return f"{parent}.?{name}.optMap({here}, {inside}).orValue([])"
