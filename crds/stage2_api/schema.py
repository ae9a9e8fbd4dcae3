"""JSON schemas by which editors complete and check job files and training YAMLs: `stage2 schema`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from stage2_api.job import GROUP, VERSION, RolloutMatchingJob
from stage2_api.runconfig import RunConfig

Kind = Literal["job", "training"]


def schema_text(kind: Kind) -> str:
    """Return the schema of a kind of file: JSON Schema without pydantic's titles and Kubernetes' extensions."""
    title, schema = _SCHEMAS[kind]
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://{GROUP}/{VERSION}/{kind}.json",  # a name; nothing needs to be there
        "title": title,
    }
    return json.dumps({**head, **_plain(schema())}, indent=1, ensure_ascii=False) + "\n"


def editor_line(schema: str) -> str:
    """Return the first line of a YAML file that an editor is to check by this schema: a path or a URL."""
    return f"# yaml-language-server: $schema={schema}\n"


def _job() -> dict[str, Any]:
    """Return the schema of a job file: the status is the controller's, and `generateName` names too."""
    schema = RolloutMatchingJob.model_json_schema(by_alias=True)
    del schema["properties"]["status"], schema["$defs"]["ObjectMeta"]["required"]
    return schema


def _training() -> dict[str, Any]:
    """Return the schema of a training YAML: a file may build on others, so no key is required of it alone."""
    schema = RunConfig.model_json_schema(by_alias=True)
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
    text = {"type": "string"}
    schema["properties"]["extends"] = {
        "anyOf": [text, {"type": "array", "items": text}],
        "description": "Files to build on, relative to this one; later ones win, and this file over all.",
    }
    return schema


_SCHEMAS: dict[Kind, tuple[str, Callable[[], dict[str, Any]]]] = {
    "job": ("RolloutMatchingJob", _job),
    "training": ("Training configuration of stage2", _training),
}


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, dict):
        return " ".join(node.split()) if isinstance(node, str) else node
    kept = {key: one for key, one in node.items() if not key.startswith("x-")}
    return {key: _plain(one) for key, one in kept.items() if key != "title" or isinstance(one, dict)}
