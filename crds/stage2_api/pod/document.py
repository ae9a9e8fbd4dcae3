"""The base of all documents that a pod hands over."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PodDocument(BaseModel):
    """A JSON object that a pod hands over: what a newer pod says beside the known keys is left aside."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, use_attribute_docstrings=True)
