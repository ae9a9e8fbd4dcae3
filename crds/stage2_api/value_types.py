"""The kinds of values that keys hold, with their bounds.

Bounds are part of the contract: without them the API server cannot tell what a rule over a list may cost it.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints

Name = Annotated[str, StringConstraints(min_length=1, max_length=253)]
"""A name: of a model's module, of a column, of a Kubernetes object."""

DnsLabel = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A DNS label (RFC 1123): lower-case letters, digits and dashes."""

_LABELS = r"([a-z0-9]([-a-z0-9]*[a-z0-9])?\.)*"

_SUBDOMAIN = rf"{_LABELS}[a-z0-9]([-a-z0-9]*[a-z0-9])?"

Subdomain = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=rf"^{_SUBDOMAIN}$")]
"""DNS labels with dots between them (RFC 1123)."""

SubdomainOrNone = Annotated[str, StringConstraints(max_length=253, pattern=rf"^({_SUBDOMAIN})?$")]
"""The same, or empty."""


def is_subdomain(text: str) -> bool:
    """Return whether a text is a Subdomain, as the names of most of Kubernetes' objects are."""
    return 0 < len(text) <= 253 and re.fullmatch(_SUBDOMAIN, text) is not None


SubdomainPrefix = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=rf"^{_LABELS}[a-z0-9][-a-z0-9]*$")
]
"""What a subdomain begins with, before the API server adds letters and digits."""

Path = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
"""A path of a file or folder where the process runs, or the name of something on a hub."""

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
