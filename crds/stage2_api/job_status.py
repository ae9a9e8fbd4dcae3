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
    """Machine-readable reason."""
    message: _Line = ""
    """Explanation for people, and what to do."""
    last_transition_time: _Timestamp | None = None
    """Time of the last change of `status`."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that the condition describes."""


class ServerStatus(ReportPart):
    """One rollout server."""

    name: _Word
    """Name of the server's container."""
    base_url: _Word | None = None
    """Address of the server inside the cluster."""
    ready: bool = False
    """Whether the server answers; one that started anew counts from the learner's next push."""
    version: int | None = None
    """Version of the server's weights: the optimizer step after which they were sent."""
    restarts: Count = 0
    """Restarts of the server's container."""
    pod: _Word | None = None
    """UID of the server's pod."""


class ImageStatus(ReportPart):
    """The image of a running container."""

    name: _Word
    """Name of the container: server-0, learner."""
    image: _Line | None = None
    """Image name as the node resolved it."""
    digest: _Line
    """Digest of the image, which identifies it even if its tag moves."""


class JobStatus(ReportPart):
    """Status of the job, written by the controller."""

    phase: Phase | None = None
    """Stage of the job's life; the conditions give the reasons."""
    conditions: list[JobCondition] = Field(
        default=[],
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """List of the conditions of the job."""
    observed_generation: Annotated[int, Field(ge=-1)] | None = None
    """Generation of the spec that this status describes; -1 before the controller has seen the job."""
    spec_hash: _Word | None = None
    """Hash of the inputs of the job's pods. A failed job runs again when it changes."""
    current_hash: _Word | None = None
    """The same hash, as the version of the controller that wrote this status computes it."""
    written_hash: _Word | None = None
    """Hash of the same inputs as their author wrote them, which no version's defaults change."""
    node: _Word | None = None
    """Name of the node of servers and learner."""
    rollout: _Word | None = None
    """Ready servers, of all servers, such as `3/3`."""
    servers: list[ServerStatus] = Field(default=[], max_length=512)
    """List of the rollout servers."""
    replicas: Count | None = None
    """Number of rollout servers that the job's pods have, ready or not; `kubectl scale` and autoscalers read it."""
    selector: _Word | None = None
    """Label selector of the servers' pods, for autoscalers."""
    learner_pod: _Word | None = None
    """UID of the learner's pod. Steps, loss and weight sync are those that this pod reported."""
    step: Count | None = None
    """Optimizer steps done."""
    furthest_step: Count | None = None
    """Optimizer steps that any learner of this job has done, since its spec was last edited."""
    max_steps: Count | None = None
    """Optimizer steps of the whole run."""
    progress: _Word | None = None
    """Optimizer steps done, of all steps, such as `12/40`."""
    loss: float | None = None
    """Loss of the last optimizer step."""
    tokens_per_second: float | None = None
    """Generated tokens per second of waiting for rollouts, in the last optimizer step."""
    best_step: Count | None = None
    """Optimizer step of the best checkpoint."""
    best_score: float | None = None
    """The best checkpoint's value of `training.metric_for_best_model`."""
    images: list[ImageStatus] = Field(default=[], max_length=64)
    """List of the containers' images, with their digests."""
    sync: SyncStatus | None = None
    """Last weight sync."""
    reproducibility: Annotated[
        dict[str, Any] | None, Field(json_schema_extra={"x-stage2-schema": free_mapping(64)})
    ] = None
    """Record for reproducing the run: servers, sync modes, seeds, hashes, versions."""
    start_time: _Timestamp | None = None
    """Time when the controller started or resumed the job."""
    first_step_time: _Timestamp | None = None
    """Time when the controller first saw an optimizer step since `startTime`."""
    completion_time: _Timestamp | None = None
    """Time when the job ended."""
    restarts: Count | None = None
    """Restarts of the learner."""
    evictions: Count | None = None
    """Evictions of the job's pods by the kubelet since `startTime`."""
    last_eviction: _Line | None = None
    """What the kubelet said of the last one."""
    evicted_pods: list[_Word] = Field(default=[], max_length=512)
    """List of the UIDs of evicted pods that were counted."""
    message: _Line | None = None
    """What the job is doing, or why it ended."""
