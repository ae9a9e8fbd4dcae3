"""The reproducibility record: what a run was made of, so that two runs can be told apart.

It is one line of the learner's log, the event `reproducibility`, and a part of its report.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from stage2_api.pod.document import PodDocument

EVENT = "reproducibility"
"""Name of the record among the events of the learner's log."""

_Text = Annotated[str, StringConstraints(max_length=4096)]
_Sha256 = Annotated[str, StringConstraints(max_length=64, pattern=r"^[0-9a-f]+$")]


class SyncModes(PodDocument):
    """How weights travel to the servers."""

    requested: _Text
    """Mode that the configuration asks for."""
    effective: _Text
    """Mode that is used."""
    merge: _Text | None = None
    """Where adapters are merged: `server` or `learner`; null where they are not merged."""
    merge_reason: _Text | None = None
    """Why they are merged there: what was found, or that the configuration says so."""
    transport: _Text | None = None
    """What carries the weights: `tcp` or `nccl`; null where it is neither."""


class DatasetDigest(PodDocument):
    """The file of training records."""

    path: _Text
    """Path of the file in the learner's container."""
    records: int
    """Records that it holds."""
    sha256: _Sha256
    """Digest of its bytes."""


class ReproducibilityRecord(PodDocument):
    """What somebody needs to tell whether two runs were the same."""

    model: _Text
    """Folder of the checkpoint, or its name on a hub."""
    servers: list[_Text] = Field(max_length=64)
    """List of the servers' addresses."""
    sync: SyncModes
    """How weights travel to the servers."""
    rollout_seed: int
    """Seed of the rollouts."""
    config_sha256: _Sha256
    """Digest of the effective configuration as sorted, compact JSON."""
    dataset: DatasetDigest
    """File of training records."""
    versions: dict[str, _Text | None] = Field(max_length=64)
    """Mapping from what computes to its version; null where it is not installed."""

    def document(self) -> dict[str, Any]:
        """Return the JSON object of the record."""
        return self.model_dump()
