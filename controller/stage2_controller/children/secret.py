"""The Secret of a job: its bearer token, which every server route but /health demands, and its certificates."""

import base64
from collections.abc import Mapping
from typing import Any

from stage2_controller.children import meta
from stage2_controller.spec import kinds


def secret(owner: Mapping[str, Any], content: Mapping[str, str]) -> meta.Manifest:
    """Return Secret `<job>-token`, created once and never written again: running pods hold its content."""
    data = {key: base64.b64encode(text.encode()).decode() for key, text in content.items()}
    body = {"type": "Opaque", "immutable": True, "data": data}
    return meta.child(kinds.SECRET, owner=owner, body=body)
