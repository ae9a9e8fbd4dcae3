"""What the learner reports: on GET /progress, in its termination log, and once in its own log (reproducibility).

The job's status copies the report. The reproducibility record says what a run was made of, so that two runs can be
told apart; it is one line of the learner's log, the event `reproducibility`, and a part of the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import from_json


class PodDocument(BaseModel):
    """A JSON object from a pod; unknown keys of a newer pod are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, use_attribute_docstrings=True)


LearnerPhase = Literal["loading", "waiting-for-servers", "syncing", "rollout", "training", "done", "failed"]
"""The phases of a learner; a newer learner may have others."""

MESSAGE_CHARACTERS = 1000
"""Characters after which the learner cuts a message."""

REASON_CHARACTERS = 512
"""Characters after which the learner cuts the reason of a choice."""

_Word = Annotated[str, StringConstraints(max_length=316)]
_Url = Annotated[str, StringConstraints(max_length=2048)]
_Line = Annotated[str, StringConstraints(max_length=32768)]
_Reason = Annotated[str, StringConstraints(max_length=REASON_CHARACTERS)]
_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


class LearnerDocument(PodDocument):
    """A part of the report: camelCase in JSON, as the job's status has it, snake_case in Python."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class ReportedServer(LearnerDocument):
    """The weights that one server holds."""

    base_url: _Url
    """Address of the server."""
    version: int
    """Version of its weights: the optimizer step after which they were sent."""


class ReportedShares(LearnerDocument):
    """The share of a weight sync's time that each of its phases took."""

    connect: _Share = 0.0
    """Forming transfer groups."""
    begin: _Share = 0.0
    """Stopping generation, and opening the update."""
    pack: _Share = 0.0
    """Merging and packing."""
    send: _Share = 0.0
    """Waiting for bytes to go out."""
    load: _Share = 0.0
    """Waiting for servers to load what had been sent."""
    finish: _Share = 0.0
    """Closing the update."""
    prove: _Share = 0.0
    """Comparing log-probabilities."""


class ReportedSync(LearnerDocument):
    """The last weight sync."""

    version: int = -1
    """Optimizer step whose weights the servers hold; -1 before the first sync."""
    requested_mode: _Word
    """Mode that the configuration asks for."""
    effective_mode: _Word
    """Mode that was used."""
    merge: _Word | None = None
    """Where adapters were merged: `server` or `learner`; null where they were not merged."""
    merge_reason: _Reason | None = None
    """Why they were merged there: what was found, or that the configuration says so."""
    transport: _Word | None = None
    """What carried the weights: `tcp`, or `nccl` and the ways that it chose between members: `nccl (NET/IB)`."""
    gigabytes_per_second: _Figure | None = None
    """Bytes that were sent to all servers in 1e9, for each second of packing to loading."""
    phases: ReportedShares | None = None
    """Share of the sync's time that each of its phases took; what is left is between them."""
    seconds: _Figure = 0.0
    """Seconds that the sync took."""
    servers: list[ReportedServer] = Field(default=[], max_length=64)
    """List of the versions that the servers hold."""

    def pushed(self, version: int, seconds: float, servers: Sequence[str]) -> Self:
        """Return the state after a sync that all of `servers` have taken."""
        held = [ReportedServer(base_url=url, version=version) for url in servers]
        return self.model_copy(update={"version": version, "seconds": seconds, "servers": held})


class LearnerReport(LearnerDocument):
    """One state of the learner."""

    step: int = 0
    """Optimizer steps that are done."""
    max_steps: int = 0
    """Optimizer steps of the whole run; 0 until they are known."""
    phase: _Word
    """What the learner is doing: one of `LearnerPhase`."""
    loss: float | None = None
    """Loss of the last optimizer step; it may be no finite number."""
    tokens_per_second: float | None = None
    """Tokens generated per second of waiting for rollouts, in the last optimizer step."""
    best_step: int | None = None
    """Optimizer step of the best checkpoint."""
    best_score: float | None = None
    """Value that it has of the metric by which checkpoints are compared."""
    sync: ReportedSync | None = None
    """Last weight sync."""
    reproducibility: dict[str, Any] = Field(default={}, max_length=64)
    """What the run is made of: `reproducibility.ReproducibilityRecord`, or nothing where it did not fit."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Times that the learner was started again in its container."""
    message: _Line = ""
    """Sentence about what the learner waits for, or why it failed."""

    def document(self) -> dict[str, Any]:
        """Return the JSON object of the report, with all keys and a message of bounded length."""
        return {**self.model_dump(by_alias=True), "message": self.message[:MESSAGE_CHARACTERS]}

    def reported(self) -> dict[str, Any]:
        """Return only the keys that the JSON object had."""
        return self.model_dump(by_alias=True, exclude_unset=True)


def read_report(document: object) -> LearnerReport | None:
    """Return the report that a JSON value is; None if it is none."""
    if not isinstance(document, Mapping):
        return None
    try:
        return LearnerReport.model_validate(dict(document))
    except ValidationError:
        return None


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
    """Everything that shows whether two runs were the same."""

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


GRACE_S = 120
"""Seconds between SIGTERM and SIGKILL of a learner, which writes a checkpoint first."""

LIMIT_BYTES = 4096
"""Bytes that the kubelet reads of a termination log."""


def termination_message(report: LearnerReport) -> str:
    """Return the report as text within `LIMIT_BYTES`, if necessary without parts that the log has too."""
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
    """Return the report in a termination message; None if a person or a traceback wrote it."""
    try:
        return read_report(from_json(text))  # it bounds depth, which json leaves to the stack
    except ValueError:
        return None
