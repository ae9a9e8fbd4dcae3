"""RolloutMatchingJob, the custom resource: what a cluster must know around a training YAML.

Group stage2.dev, version v1alpha1, short name rmj, namespaced. camelCase in YAML, snake_case in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from stage2_api.job_status import JobStatus
from stage2_api.kubernetes_types import (
    Affinity,
    LabelValue,
    ObjectReference,
    PodTemplate,
    QualifiedName,
    Resources,
    Toleration,
    Volume,
)
from stage2_api.runconfig import RunConfig
from stage2_api.section import DnsLabel, KubernetesObject, Name, Subdomain, SubdomainOrNone, SubdomainPrefix

GROUP = "stage2.dev"
VERSION = "v1alpha1"
KIND = "RolloutMatchingJob"
PLURAL = "rolloutmatchingjobs"
SINGULAR = "rolloutmatchingjob"
SHORT_NAME = "rmj"
LONGEST_PREFIX = 58
"""Characters of `generateName` that the API server keeps: a name that it makes is a DNS label."""

Image = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class RolloutSpec(KubernetesObject):
    """The rollout servers: one pod with one container for each server."""

    servers: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of vLLM servers. With `vllm.mode: server` at least one; otherwise the learner makes its rollouts itself
    and this stays 0."""
    gpus_per_server: Annotated[int, Field(ge=0, le=16)] = 1
    """GPUs of each server; equals `vllm.tensor_parallel_size`."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 8000
    """TCP port of the first server; the next ones take the ports after it."""
    resource_claim_template: Name | None = None
    """Name of the ResourceClaimTemplate (resource.k8s.io/v1) from which each server gets a claim of its own, for
    `gpusPerServer` GPUs, in place of `gpuResource`. The learner then has one too."""
    resources: Resources | None = None
    """Compute resources of each server's container, besides GPUs."""
    template: PodTemplate = Field(default={})
    """Pod template that is merged over the servers' own, as `kubectl patch` merges. In `spec.containers`, the name
    `server` stands for every server, `server-0` for the first."""


class LearnerSpec(KubernetesObject):
    """The learner: a Job with one pod, on the servers' node."""

    gpus: Annotated[int, Field(ge=0, le=16)] = 1
    """GPUs of the learner: 1 with servers; in colocate mode as many as there are, one learner process for each."""
    resource_claim_template: Name | None = None
    """Name of the ResourceClaimTemplate (resource.k8s.io/v1) from which the learner gets its claim, for `gpus` GPUs,
    in place of `gpuResource`. Servers then have one too."""
    resources: Resources | None = None
    """Compute resources of the learner's container, besides GPUs."""
    template: PodTemplate = Field(default={})
    """Pod template that is merged over the learner's own, as `kubectl patch` merges; its container is `learner`."""
    backoff_limit: Annotated[int, Field(ge=0, le=100)] = 3
    """Times that a learner that failed is started again, from its last checkpoint. A configuration error is never
    tried again."""
    start_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] = 3600
    """Seconds that the servers have, once they have a node, until all of them answer and the learner starts; then the
    job fails. Waiting for a node or for quota does not count."""


class Placement(KubernetesObject):
    """Where servers and learner run: all on one node."""

    node_selector: dict[QualifiedName, LabelValue] = Field(default={}, max_length=32)
    """Mapping of labels that the node must have."""
    affinity: Affinity | None = None
    """Affinity to nodes, for choices that `nodeSelector` cannot tell: one of several GPU models, not one pool."""
    tolerations: list[Toleration] = Field(default=[], max_length=32)
    """List of taints that the pods accept."""
    priority_class_name: SubdomainOrNone = ""
    """Name of the pods' PriorityClass; empty means the cluster's default."""
    mode: Literal["Reserve", "Scheduler"] = "Reserve"
    """Who finds the node: `Reserve`, the controller, which keeps room there for the whole job; `Scheduler`, the
    scheduler, for pods that are pending from the beginning: where only an autoscaler knows which nodes could be made,
    or volumes tie the job to some."""


class Tls(KubernetesObject):
    """TLS between servers, learner and controller, with certificates of the job's own that the controller makes."""

    enabled: bool = True
    """Whether servers answer and the learner tells its progress over TLS alone. Without it the job's token, images and
    answers cross the cluster's network in clear text."""


class Network(KubernetesObject):
    """What the pods may reach. What may reach them is each other, the controller and Prometheus alone."""

    egress: Literal["Auto", "Closed", "Open"] = "Auto"
    """Where servers and learner may connect to: `Closed`, to each other and to name servers; `Open`, anywhere; `Auto`,
    closed unless the job names something that lies elsewhere: a model or a sentence-embedding model as on a hub, a
    tracker but TensorBoard, a container of its own in a template. Another NetworkPolicy over the pods may open more."""


class JobSpec(KubernetesObject):
    """What the job is to do."""

    suspend: bool = False
    """Whether the job waits without pods. Setting it back resumes from the last checkpoint; while it is set, the spec
    can be edited."""
    image: Image | None = None
    """Container image of servers and learner; unset means the one with which stage2 was installed."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When nodes fetch the image."""
    image_pull_secrets: list[ObjectReference] = Field(default=[], max_length=16)
    """List of Secrets with credentials for the image's registry."""
    gpu_resource: Annotated[
        str,
        StringConstraints(
            max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
        ),
    ] = "nvidia.com/gpu"
    """Resource name under which nodes offer GPUs; empty for runs on the CPU. Containers with a ResourceClaimTemplate
    do not ask for it."""
    rollout: RolloutSpec = RolloutSpec()
    """Rollout servers: how many, with what, where they listen."""
    learner: LearnerSpec = LearnerSpec()
    """Learner: its GPUs, its retries."""
    tls: Tls = Tls()
    """Encryption of what servers, learner and controller ask each other over HTTP."""
    network: Network = Network()
    """Limits on what the pods may reach, where the cluster enforces NetworkPolicies."""
    placement: Placement = Placement()
    """Node choice for all pods: selector, tolerations, priority."""
    volumes: list[Volume] = Field(
        default=[],
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """List of volumes for model, data and output, mounted in every container."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Seconds after its start at which a job that has not ended fails; unset means no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds after its end at which the job is deleted; unset keeps it."""
    managed_by: (
        Annotated[
            str,
            StringConstraints(
                min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[-A-Za-z0-9_./]+)?$"
            ),
        ]
        | None
    ) = None
    """Name of the controller that works on the job. Unset or `stage2.dev/controller` means stage2's own; anything else
    makes stage2 leave the job alone."""
    config: RunConfig
    """Training configuration: the YAML that `stage2 learn` takes, with its own snake_case keys."""


class ObjectMeta(KubernetesObject):
    """The part of an object's metadata that stage2 reads."""

    model_config = ConfigDict(extra="ignore")

    name: Subdomain
    """Name of the job: at most 253 lower-case letters, digits, dashes and dots, no dash or dot beside a dot."""
    generate_name: SubdomainPrefix | None = None
    """What the API server makes a name from where there is none: as a name, but a dash may end it. Such a job is for
    `kubectl create`; before that, five `x` stand for the characters that the API server chooses."""
    namespace: DnsLabel | None = None
    """Namespace of the job: at most 63 lower-case letters, digits and dashes, no dash first or last."""
    uid: str | None = None
    """Identity that the API server gave."""
    generation: int | None = None
    """Number that grows with each change of the spec."""
    labels: dict[str, str] | None = None
    """Mapping of labels."""
    annotations: dict[str, str] | None = None
    """Mapping of annotations."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """Name what only has a prefix as the API server does, with five characters of its choice for `xxxxx`."""
        prefix = value.get("generateName") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(prefix, str) or not prefix or value.get("name"):
            return value
        return {**value, "name": prefix[:LONGEST_PREFIX] + "xxxxx"}

    @field_validator("namespace", "generate_name", mode="before")
    @classmethod
    def _absent(cls, value: object) -> object:
        return None if value == "" else value  # as the API server has it


class RolloutMatchingJob(KubernetesObject):
    """A rollout-matching training run: rollout servers and a learner on one node, from a training YAML."""

    api_version: Literal["stage2.dev/v1alpha1"]
    """Version of the schema of this object."""
    kind: Literal["RolloutMatchingJob"]
    """Kind of this object."""
    metadata: ObjectMeta
    """Name, namespace, labels."""
    spec: JobSpec
    """What the job is to do."""
    status: JobStatus | None = None
    """What the controller observes of the job."""
