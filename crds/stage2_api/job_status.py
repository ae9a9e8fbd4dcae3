"""The status of a RolloutMatchingJob: written by the controller, read by people."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from stage2_api.pod.report import REASON_CHARACTERS
from stage2_api.section import Count, KubernetesObject, free_mapping

Phase = Literal["Pending", "Starting", "Running", "Succeeded", "Failed", "Suspended"]
_Timestamp = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
_Word = Annotated[str, Field(max_length=316)]
_Line = Annotated[str, Field(max_length=32768)]
_Reason = Annotated[str, Field(max_length=REASON_CHARACTERS)]


class StatusPart(KubernetesObject):
    """Part of a status: what a newer controller wrote beside the known fields is left alone."""

    model_config = ConfigDict(extra="ignore")

    filled_in: ClassVar[bool] = False


class JobCondition(StatusPart):
    """One aspect of the job's state, in the form that all Kubernetes objects share."""

    type: _Word
    """Type of the condition, such as Accepted, RolloutReady, LearnerRunning, WeightsInSync, Succeeded or Failed."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: _Word
    """Word for programs that says why."""
    message: _Line = ""
    """Sentence for people that says why, and what to do."""
    last_transition_time: _Timestamp | None = None
    """Time at which `status` last changed."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that the condition is about."""


class ServerStatus(StatusPart):
    """One rollout server."""

    name: _Word
    """Name of the server's container."""
    base_url: _Word | None = None
    """Address of the server inside the cluster."""
    ready: bool = False
    """Whether the server answers."""
    version: int | None = None
    """Version of the weights that the server holds: the optimizer step after which they were sent."""
    restarts: Count = 0
    """Times that the server's container was started again."""


class SyncedServer(StatusPart):
    """The version of weights that one server holds."""

    base_url: _Word
    """Address of the server."""
    version: int
    """Version of the weights that it holds."""


class PhaseShares(StatusPart):
    """The share of a weight sync's time that each of its phases took."""

    connect: float | None = None
    """Share of forming transfer groups."""
    begin: float | None = None
    """Share of stopping generation, and opening the update."""
    pack: float | None = None
    """Share of merging and packing."""
    send: float | None = None
    """Share of waiting for bytes to go out."""
    load: float | None = None
    """Share of waiting for servers to load what had been sent."""
    finish: float | None = None
    """Share of closing the update."""
    prove: float | None = None
    """Share of comparing log-probabilities."""


class SyncStatus(StatusPart):
    """The last weight sync."""

    version: int | None = None
    """Version of the weights that were sent: the optimizer step after which they were sent."""
    requested_mode: _Word | None = None
    """Mode that the configuration asks for."""
    effective_mode: _Word | None = None
    """Mode that was used."""
    merge: _Word | None = None
    """Where adapters were merged: `server` or `learner`; null where they were not merged."""
    merge_reason: _Reason | None = None
    """Why they were merged there: what was found, or that the configuration says so."""
    transport: _Word | None = None
    """What carried the weights: `tcp`, or `nccl` and the ways that it chose between members: `nccl (NET/IB)`."""
    gigabytes_per_second: float | None = None
    """Bytes that were sent to all servers in 1e9, for each second of packing to loading."""
    phases: PhaseShares | None = None
    """Share of the sync's time that each of its phases took; what is left is between them."""
    seconds: float | None = None
    """Seconds that the sync took."""
    servers: list[SyncedServer] = Field(default=[], max_length=64)
    """List of the versions that the servers hold."""


class ImageStatus(StatusPart):
    """The image that a container really runs."""

    name: _Word
    """Name of the container: server-0, learner."""
    image: _Line | None = None
    """Image as the node resolved its name."""
    digest: _Line
    """Digest of the image, by which it can be had again whatever its tag means by then."""


class JobStatus(StatusPart):
    """What the controller observes of the job."""

    phase: Phase | None = None
    """Stage of the job's life, in one word; the conditions say why."""
    conditions: list[JobCondition] = Field(
        default=[],
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """List of the aspects of the job's state."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status is about."""
    spec_hash: _Word | None = None
    """Hash of what the job's pods are made from: a job that failed runs again when it becomes another one."""
    node: _Word | None = None
    """Name of the node on which servers and learner run."""
    rollout: _Word | None = None
    """Servers that answer, of all: `3/3`."""
    servers: list[ServerStatus] = Field(default=[], max_length=64)
    """List of the rollout servers."""
    step: Count | None = None
    """Optimizer steps that are done."""
    max_steps: Count | None = None
    """Optimizer steps of the whole run."""
    progress: _Word | None = None
    """Optimizer steps that are done, of all: `12/40`."""
    loss: float | None = None
    """Loss of the last optimizer step."""
    tokens_per_second: float | None = None
    """Tokens that were generated per second of waiting for rollouts, in the last optimizer step."""
    best_step: Count | None = None
    """Optimizer step of the best checkpoint, which is kept."""
    best_score: float | None = None
    """Value that it has of `training.metric_for_best_model`."""
    images: list[ImageStatus] = Field(default=[], max_length=64)
    """List of the images that the containers run, with their digests."""
    sync: SyncStatus | None = None
    """Weight sync: the last one."""
    reproducibility: Annotated[
        dict[str, Any] | None, Field(json_schema_extra={"x-stage2-schema": free_mapping(64)})
    ] = None
    """Record of what is needed to run the job again: servers, sync modes, seeds, hashes, versions."""
    start_time: _Timestamp | None = None
    """Time at which the controller first worked on the job, or resumed it."""
    completion_time: _Timestamp | None = None
    """Time at which the job ended."""
    restarts: Count | None = None
    """Times that the learner was started again."""
    message: _Line | None = None
    """Sentence that says what the job is doing or why it ended."""
