"""The Secret with the job's bearer token, which every server route but /health demands."""

from collections.abc import Mapping
from typing import Any

from stage2_api.pod import files
from stage2_controller.job import kinds
from stage2_controller.job.children import meta


def secret(owner: Mapping[str, Any], token: str) -> meta.Manifest:
    """Return Secret `<job>-token`, created once and never written again: running pods hold its token."""
    body = {"type": "Opaque", "immutable": True, "stringData": {files.TOKEN_KEY: token}}
    return meta.child(kinds.SECRET, owner=owner, body=body)
