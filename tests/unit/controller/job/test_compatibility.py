"""Objects and definitions of earlier versions stay good: nothing that was accepted is refused, no field is lost.

`old/` is added to and never edited. To `old/defaults.txt` nothing is added either: it lists what the definition of
2026-11-21, the oldest, fills in. `old/fields.txt` lists every field of the definition with its type and bounds;
new fields are added by `python -m tests.unit.controller.job.test_compatibility`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_api.crd import custom_resource_definition
from stage2_api.parsing import parse_job
from stage2_controller.state import reasons
from tests.unit.api.test_crd import fields
from tests.unit.controller import builders as b

OLD = Path(__file__).parents[1] / "old"
FIELDS = OLD / "fields.txt"
DEFAULTS = OLD / "defaults.txt"
TIGHTER_IF_LESS = ("maxLength", "maxItems", "maxProperties", "maximum")
TIGHTER_IF_MORE = ("minLength", "minItems", "minProperties", "minimum")


def definition() -> dict[str, Any]:
    (version,) = custom_resource_definition()["spec"]["versions"]
    return dict(fields(version["schema"]["openAPIV3Schema"], ""))


def line(path: str, schema: Any) -> str:
    bounds = {key: schema[key] for key in (*TIGHTER_IF_LESS, *TIGHTER_IF_MORE) if key in schema}
    kind = schema.get("type", "any")
    return yaml.safe_dump([path, kind, bounds, schema.get("enum", [])], default_flow_style=True, width=10**6).strip()


OLD_FIELDS = [yaml.safe_load(text) for text in FIELDS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("path", sorted(OLD.glob("*.yaml")), ids=lambda path: path.name)
def test_old_job_manifest_is_accepted_and_planned(path: Path) -> None:
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    metadata = {"namespace": "team-a", "uid": "u", "generation": 1, "resourceVersion": "1", **raw["metadata"]}
    assert parse_job(raw).spec.config
    made = b.planned({**raw, "metadata": metadata})
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.VALID)


def test_old_crd_fields_are_neither_removed_nor_narrowed() -> None:
    now = definition()
    opened = tuple(
        f"{path}."
        for path, schema in now.items()
        if schema.get("x-kubernetes-preserve-unknown-fields") and "properties" not in schema
    )
    assert [path for path, *_ in OLD_FIELDS if path not in now and not path.startswith(opened)] == []
    narrowed = [
        (path, key)
        for path, kind, bounds, enum in OLD_FIELDS
        for key, was in {**bounds, "type": kind, "enum": enum}.items()
        if path in now and _narrower(now[path], key, was)
    ]
    assert narrowed == []


def test_old_optional_fields_stay_optional() -> None:
    def required(schema: Any, path: str = "") -> Iterator[str]:
        yield from (f"{path}.{key}" for key in schema.get("required", []))
        for key, value in schema.get("properties", {}).items():
            yield from required(value.get("items", value), f"{path}.{key}")

    (version,) = custom_resource_definition()["spec"]["versions"]
    known = {path for path, *_ in OLD_FIELDS}
    allowed = set((OLD / "required.txt").read_text(encoding="utf-8").splitlines())
    assert {path for path in required(version["schema"]["openAPIV3Schema"]) if path in known} <= allowed


def test_crd_fills_in_no_defaults_beyond_oldest_version() -> None:
    """A rollback would find it in jobs as a key that nobody wrote, and refuse each of their edits."""

    def filled_in(schema: Any, path: str) -> Iterator[str]:
        for key, value in schema.get("properties", {}).items():
            if "default" in value:
                yield f"{path}.{key} {json.dumps(value['default'])}"
            yield from filled_in(value.get("items", value), f"{path}.{key}{'[]' if 'items' in value else ''}")

    (version,) = custom_resource_definition()["spec"]["versions"]
    now = filled_in(version["schema"]["openAPIV3Schema"]["properties"]["spec"], "spec")
    assert sorted(now) == DEFAULTS.read_text(encoding="utf-8").splitlines()


def _narrower(schema: Any, key: str, was: Any) -> bool:
    if key == "type":
        return bool(schema.get("type", "any") != was)
    if key == "enum":
        return bool(was) and not set(was) <= set(schema.get("enum", was))
    if key in TIGHTER_IF_LESS:
        return bool(schema.get(key, was) < was)
    return bool(schema.get(key, was) > was)


if __name__ == "__main__":
    known = {path for path, *_ in OLD_FIELDS}
    with FIELDS.open("a", encoding="utf-8") as file:
        file.writelines(f"{line(path, schema)}\n" for path, schema in definition().items() if path not in known)
