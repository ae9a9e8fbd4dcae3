"""Base classes of all models, and the types of their values.

Every value has bounds, because the API server needs them to estimate the cost of a rule.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

Name = Annotated[str, StringConstraints(min_length=1, max_length=253)]
"""A name, such as that of a module or of a Kubernetes object."""

DnsLabel = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A DNS label (RFC 1123): lower-case letters, digits and dashes."""

_LABELS = r"([a-z0-9]([-a-z0-9]*[a-z0-9])?\.)*"

_SUBDOMAIN = rf"{_LABELS}[a-z0-9]([-a-z0-9]*[a-z0-9])?"

Subdomain = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=rf"^{_SUBDOMAIN}$")]
"""DNS labels with dots between them (RFC 1123)."""

SubdomainOrNone = Annotated[str, StringConstraints(max_length=253, pattern=rf"^({_SUBDOMAIN})?$")]
"""The same, or empty."""


def is_subdomain(text: str) -> bool:
    """Return whether a text is a Subdomain, as most names of Kubernetes objects are."""
    return 0 < len(text) <= 253 and re.fullmatch(_SUBDOMAIN, text) is not None


SubdomainPrefix = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=rf"^{_LABELS}[a-z0-9][-a-z0-9]*$")
]
"""A prefix to which the API server appends letters and digits."""

Path = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
"""A path of a file or folder, or a name on a hub."""

Url = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
"""An address with scheme, host and port."""

Text = Annotated[str, StringConstraints(max_length=32768)]
"""Free text: a prompt, a regular expression."""

Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A count of at least one."""

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A count that may be zero."""

Weight = Annotated[float, Field(ge=0)]
"""A factor that may be zero."""

Scale = Annotated[float, Field(gt=0)]
"""A factor that may not be zero."""

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A share of a whole."""


class Section(BaseModel):
    """A section of the training YAML: snake_case keys, no unknown keys, and no conversion of `true` or `"5"` to a
    number."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    lists_its_keys: ClassVar[bool] = False
    """Whether the message about an unknown key lists all keys of the section."""


class KubernetesObject(Section):
    """A part of a Kubernetes object: camelCase in YAML, snake_case in Python."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


def free_mapping(limit: int) -> dict[str, Any]:
    """Return the JSON-schema keywords of a mapping with foreign keys (of Kubernetes or DeepSpeed)."""
    return {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "maxProperties": limit}
