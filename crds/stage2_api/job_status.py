"""The status of a RolloutMatchingJob: written by the controller, read by people."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stage2_api.pod.report import ReportPart, SyncStatus
from stage2_api.section import Count, free_mapping

Phase = Literal["Pending", "Starting", "Running", "Succeeded", "Failed", "Suspended"]
_Timestamp = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
_Word = Annotated[str, Field(max_length=316)]
_Line = Annotated[str, Field(max_length=32768)]


class JobCondition(ReportPart):
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


class ServerStatus(ReportPart):
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


class ImageStatus(ReportPart):
    """The image that a container really runs."""

    name: _Word
    """Name of the container: server-0, learner."""
    image: _Line | None = None
    """Image as the node resolved its name."""
    digest: _Line
    """Digest of the image, by which it can be had again whatever its tag means by then."""


class JobStatus(ReportPart):
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
