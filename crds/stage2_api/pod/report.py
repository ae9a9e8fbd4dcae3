"""The learner's report, on GET /progress and in its termination log, and the reproducibility record in its log.

The job's status copies the report. The reproducibility record lists the inputs of a run, so that two runs can be
compared. It is the event `reproducibility` in the learner's log, and a part of the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from stage2_api.section import KubernetesObject, Section

LearnerPhase = Literal["loading", "waiting-for-servers", "syncing", "rollout", "training", "done", "failed"]
"""Phases of a learner; a newer version may have others."""

MESSAGE_CHARACTERS = 1000
"""Maximum length of a message."""

REASON_CHARACTERS = 512
"""Maximum length of a reason."""

_Word = Annotated[str, StringConstraints(max_length=316)]
_Url = Annotated[str, StringConstraints(max_length=2048)]
_Line = Annotated[str, StringConstraints(max_length=32768)]
_Reason = Annotated[str, StringConstraints(max_length=REASON_CHARACTERS)]
_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


class ReportPart(KubernetesObject):
    """Part of a learner's report or of a job's status; keys that a newer version wrote are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=True)


class SyncedServer(ReportPart):
    """The version of the weights on one server."""

    base_url: _Url
    """Address of the server."""
    version: int
    """Version of its weights: the optimizer step after which they were sent."""


class PhaseShares(ReportPart):
    """How a weight sync's time divides among its phases."""

    connect: _Share = 0.0
    """Share spent forming transfer groups."""
    begin: _Share = 0.0
    """Share spent pausing generation and opening the update."""
    pack: _Share = 0.0
    """Share spent merging and packing."""
    send: _Share = 0.0
    """Share spent waiting for bytes to go out."""
    load: _Share = 0.0
    """Share spent waiting for servers to load what was sent."""
    finish: _Share = 0.0
    """Share spent closing the update."""
    prove: _Share = 0.0
    """Share spent comparing log-probabilities."""


class SyncStatus(ReportPart):
    """The last weight sync."""

    version: int = -1
    """Version of the servers' weights: the optimizer step after which they were sent; -1 before the first sync."""
    pushes: Annotated[int, Field(ge=0)] = 0
    """Number of syncs since the start of the learner, with those of a version that was pushed before."""
    requested_mode: _Word = ""
    """Mode in the configuration."""
    effective_mode: _Word = ""
    """Mode that was used."""
    merge: _Word | None = None
    """Where adapters were merged: `server` or `learner`; null if they were not merged."""
    merge_reason: _Reason | None = None
    """Why adapters were merged there."""
    transport: _Word | None = None
    """Transport of the weights: `tcp` or `nccl`."""
    gigabytes_per_second: _Figure | None = None
    """Throughput from packing to loading, over all servers, in GB (1e9 bytes) per second."""
    phases: PhaseShares | None = None
    """Share of the sync's time that each phase took; the rest was spent between phases."""
    seconds: _Figure = 0.0
    """Duration of the sync in seconds."""
    servers: list[SyncedServer] = Field(default=[], max_length=64)
    """List of the servers with the version of their weights."""

    def pushed(self, version: int, seconds: float, servers: Sequence[str]) -> Self:
        """Return the status after a sync to all of `servers`."""
        held = [SyncedServer(base_url=url, version=version) for url in servers]
        return self.model_copy(update={"version": version, "seconds": seconds, "servers": held})


class LearnerReport(ReportPart):
    """The state of the learner."""

    step: int = 0
    """Optimizer steps done."""
    max_steps: int = 0
    """Optimizer steps of the whole run; 0 until they are known."""
    resumed_step: Annotated[int, Field(ge=0)] | None = None
    """Optimizer step of the checkpoint from which this learner began; 0 without one, null until it is known."""
    phase: _Word
    """What the learner is doing: one of `LearnerPhase`."""
    loss: float | None = None
    """Loss of the last optimizer step, which may be NaN."""
    tokens_per_second: float | None = None
    """Tokens generated per second of waiting for rollouts, in the last optimizer step."""
    best_step: int | None = None
    """Optimizer step of the best checkpoint."""
    best_score: float | None = None
    """Metric of the best checkpoint."""
    sync: SyncStatus | None = None
    """Last weight sync."""
    reproducibility: dict[str, Any] = Field(default={}, max_length=64)
    """The `ReproducibilityRecord`; empty if it did not fit."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts of the learner in its container."""
    message: _Line = ""
    """What the learner is doing, if it takes long, or why it failed."""

    def document(self) -> dict[str, Any]:
        """Return the report as a JSON object, with all keys and a message of bounded length."""
        return {**self.model_dump(by_alias=True), "message": self.message[:MESSAGE_CHARACTERS]}

    def reported(self) -> dict[str, Any]:
        """Return only the keys that were set."""
        return self.model_dump(by_alias=True, exclude_unset=True)


def read_report(document: object) -> LearnerReport | None:
    """Parse a report; return None for anything else."""
    if not isinstance(document, Mapping):
        return None
    try:
        return LearnerReport.model_validate(dict(document))
    except ValidationError:
        return None


EVENT = "reproducibility"
"""Event name of the record in the learner's log."""

_Text = Annotated[str, StringConstraints(max_length=4096)]
_Sha256 = Annotated[str, StringConstraints(max_length=64, pattern=r"^[0-9a-f]+$")]


class RecordPart(Section):
    """Part of the reproducibility record; keys that a newer learner wrote are ignored."""

    model_config = ConfigDict(extra="ignore")


class SyncModes(RecordPart):
    """Weight sync: modes and transport."""

    requested: _Text
    """Mode in the configuration."""
    effective: _Text
    """Mode that is used."""
    merge: _Text | None = None
    """Where adapters are merged: `server` or `learner`; null if they are not merged."""
    merge_reason: _Text | None = None
    """Why adapters are merged there."""
    transport: _Text | None = None
    """Transport of the weights: `tcp` or `nccl`, else null."""


class DatasetDigest(RecordPart):
    """The file of training records."""

    path: _Text
    """Path of the file in the learner's container."""
    records: int
    """Records that it holds."""
    sha256: _Sha256
    """Digest of its bytes."""


class ReproducibilityRecord(RecordPart):
    """The inputs of a run, for comparison with another run."""

    model: _Text
    """Folder of the checkpoint, or its name on a hub."""
    servers: list[_Text] = Field(max_length=64)
    """List of the servers' addresses."""
    engines: list[_Text] = Field(default=[], max_length=64)
    """List of what computes each server's answers, or the learner's own engine's: vLLM's model runner, attention
    backend and sampler, and what drafts."""
    attention: _Text = ""
    """What computes the learner's attention: the implementation, and for packed rows what it runs on."""
    sync: SyncModes
    """Weight sync: modes and transport."""
    rollout_seed: int
    """Seed of the rollouts."""
    config_sha256: _Sha256
    """Digest of the effective configuration as sorted, compact JSON."""
    dataset: DatasetDigest
    """File of training records."""
    versions: dict[str, _Text | None] = Field(max_length=64)
    """Mapping of package to version; null if it is not installed."""

    def document(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return self.model_dump()


GRACE_S = 120
"""Seconds between SIGTERM and SIGKILL of a learner, in which it writes a checkpoint."""

LIMIT_BYTES = 4096
"""Bytes of a termination log that the kubelet reads."""


def termination_message(report: LearnerReport) -> str:
    """Return the report as JSON of at most `LIMIT_BYTES`, if necessary without parts that are in the log."""
    if _bytes(report) > LIMIT_BYTES:
        report = report.model_copy(update={"reproducibility": {}})
    if _bytes(report) > LIMIT_BYTES and report.sync:
        report = report.model_copy(
            update={"sync": report.sync.model_copy(update={"merge_reason": None, "phases": None})}
        )
    room_for_message = LIMIT_BYTES - MESSAGE_CHARACTERS
    if _bytes(report) > LIMIT_BYTES and report.sync and _bytes(report, message="") > room_for_message:
        report = report.model_copy(update={"sync": report.sync.model_copy(update={"servers": []})})
    while _bytes(report) > LIMIT_BYTES and report.message:
        message = report.document()["message"]
        report = report.model_copy(update={"message": message[: len(message) // 2]})
    return json.dumps(report.document())


def _bytes(report: LearnerReport, **changed: str) -> int:
    return len(json.dumps(report.model_copy(update=changed).document()).encode())


def read_termination_message(text: str) -> LearnerReport | None:
    """Parse the report in a termination message; return None for other text."""
    try:
        return read_report(from_json(text))  # unlike json, it limits the nesting depth
    except ValueError:
        return None
