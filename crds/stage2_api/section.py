"""The models that all others derive from: strict sections of the training YAML, and parts of Kubernetes objects."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Section(BaseModel):
    """A section of the training YAML: snake_case keys, no unknown ones; neither `true` nor `"5"` is a number."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    filled_in: ClassVar[bool] = False
    """Whether the API server writes defaults into the object; the training YAML keeps the form in which it came."""

    lists_its_keys: ClassVar[bool] = False
    """Whether an unknown key is answered with all keys that the section takes."""


class KubernetesObject(Section):
    """A part of a Kubernetes object: camelCase in YAML, snake_case in Python."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    filled_in: ClassVar[bool] = True


def free_mapping(limit: int, **more: Any) -> dict[str, Any]:
    """Return the JSON-schema keywords of a mapping whose keys belong to someone else (Kubernetes, DeepSpeed)."""
    return {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "maxProperties": limit, **more}
