"""The ValidatingAdmissionPolicy for what the definition cannot refuse, generated into `crds/known-keys.yaml`.

It refuses a write that adds unknown keys, which the definition keeps so that none is lost silently, and specs that are
too large: free mappings have any size and depth, and an API server cannot list an object that is nested as deep as its
decoder goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stage2_api import job
from stage2_api.crd import Schema, sections, structural
from stage2_api.validation import key_paths
from stage2_api.validation.size import LARGEST, MOST_PARTS

_SUMMANDS = 16  # parsers bound how deep an expression is nested, and a sum nests
_WRITTEN = "'%s'.format([{}.?spec.orValue({{}})])"
_PARTS = "variables.{0}.split('{{').size() + variables.{0}.split('[').size() - 2"  # and brackets in texts
_ROOT_KEYS = list(key_paths.fields(job.RolloutMatchingJob))
# What is unchanged does not count, so that an old job can lose its last finalizer. Nor do keys of the spec that have no
# room for more: a job with a key that was removed since, or above a new bound, is suspended and given deadlines.
_IS_NEW = (
    "oldObject == null || !object.?spec.orValue({{}}).all(k, k in {} || object.spec[?k] == oldObject.?spec[?k])"
    f" || object.exists(k, !(k in {_ROOT_KEYS}) && (!(k in oldObject) || object[k] != oldObject[k]))"
)
# No bound holds for what is beside the spec, so that a value there may not change either.
_ADDED_BESIDE_THE_SPEC = (
    f"object.filter(k, !(k in {_ROOT_KEYS}) && (oldObject == null || !(k in oldObject) || object[k] != oldObject[k]))"
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
    unknown = list(_unknown_keys(spec))
    now, before = (_sum([f"variables.{variable}[{when}]" for variable, _ in unknown]) for when in (0, 1))
    added = f"variables.added_beside_the_spec + ({now}).filter(k, !(k in variables.unknown_before))"
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "matchConditions": [
                {"name": "the-spec-or-a-key-beside-it-is-new", "expression": _IS_NEW.format(_without_room(spec))}
            ],
            "variables": [
                {"name": "objects", "expression": "[object, oldObject == null ? {} : oldObject]"},
                *({"name": variable, "expression": f"variables.objects.map(o, {one})"} for variable, one in unknown),
                # What another version or a webhook has left in a job must not keep its author from every edit.
                {"name": "unknown_before", "expression": before},
                {"name": "added_beside_the_spec", "expression": _ADDED_BESIDE_THE_SPEC},
                {"name": "unknown", "expression": added},
                # Formatted, because visiting each value took an API server 23 s for 150 kB.
                {"name": "written", "expression": _WRITTEN.format("object")},
                {"name": "characters", "expression": "variables.written.size()"},
                {"name": "parts", "expression": _PARTS.format("written")},
                # An old job may keep its size.
                {"name": "before", "expression": f"oldObject == null ? '' : {_WRITTEN.format('oldObject')}"},
                {"name": "characters_before", "expression": "variables.before.size()"},
                {"name": "parts_before", "expression": _PARTS.format("before")},
            ],
            "validations": [
                _at_most(LARGEST, "characters", "characters", "put long texts into files of spec.volumes"),
                _at_most(
                    MOST_PARTS, "parts", "mappings, lists and brackets in texts", "remove what the job does not need"
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
        "expression": f"{held} <= {most} || {held} <= {held}_before",
        "messageExpression": f"'spec: ' + string(variables.{count}) + '{rule}'",
    }


def _without_room(spec: Schema) -> list[str]:
    """Return the keys of the spec that hold only a boolean or a bounded number."""
    return [key for key, value in spec["properties"].items() if value["type"] in ("boolean", "integer")]


def _sum(lists: list[str]) -> str:
    """Return a CEL expression for some lists together."""
    groups = (lists[first : first + _SUMMANDS] for first in range(0, len(lists), _SUMMANDS))
    return " + ".join(f"({' + '.join(group)})" for group in groups)


def _unknown_keys(spec: Schema) -> Iterator[tuple[str, str]]:
    """Yield, for each section of the spec, a CEL variable's name and the expression that lists unknown keys of `o`."""
    for path, schema, _ in sections(spec, "spec"):
        steps = path.split(".")
        yield "_".join(part.removesuffix("[]") for part in steps), _unknown("o", steps, schema, "", 0)


def _unknown(parent: str, steps: list[str], schema: Schema, path: str, depth: int) -> str:
    """Return a CEL expression for the unknown keys of the section that `steps` lead to from `parent`."""
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
