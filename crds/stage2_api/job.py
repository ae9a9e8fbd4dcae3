"""RolloutMatchingJob, the custom resource: a training YAML and what a cluster needs to run it.

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
"""Characters of `generateName` that the API server keeps, so that the name is a DNS label."""

Image = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class RolloutSpec(KubernetesObject):
    """The rollout servers: one pod with one container for each server, or several pods with engine JobSet."""

    servers: Annotated[int, Field(ge=0, le=512)] = 0
    """Number of vLLM servers: at least one with `vllm.mode: server`; otherwise 0, because the learner generates the
    rollouts. Engine Node allows at most 16. With engine JobSet the number may change while the job runs
    (`kubectl scale`)."""
    servers_per_pod: Annotated[int, Field(ge=1, le=16)] = 1
    """Number of servers in each pod of engine JobSet; must divide `servers`. Engine Node has one pod with all."""
    gpus_per_server: Annotated[int, Field(ge=0, le=16)] = 1
    """GPUs of each server; must equal `vllm.tensor_parallel_size`."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 8000
    """TCP port of the first server; the others use the following ports."""
    resource_claim_template: Name | None = None
    """Name of the ResourceClaimTemplate (resource.k8s.io/v1) for the `gpusPerServer` GPUs of each server, which
    replaces `gpuResource`. The learner then needs one too."""
    resources: Resources | None = None
    """Compute resources of each server's container, besides GPUs."""
    template: PodTemplate = Field(default={})
    """Pod template to merge into the servers', as `kubectl patch` does. In `spec.containers`, the name `server` means
    every server, and `server-0` the first one."""


class LearnerSpec(KubernetesObject):
    """The learner: a Job with one pod on the servers' node, or with engine JobSet one pod on each of its nodes."""

    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of the learner's pods, each with `gpus` GPUs. More than one needs engine JobSet, and with servers
    `vllm.server.learners: sharded` (or GRPO)."""
    gpus: Annotated[int, Field(ge=0, le=16)] = 1
    """GPUs of each of the learner's pods, with one learner process per GPU: 1 with servers, unless
    `vllm.server.learners` is `sharded`; in colocate mode any number."""
    resource_claim_template: Name | None = None
    """Name of the ResourceClaimTemplate (resource.k8s.io/v1) for the learner's `gpus` GPUs, which replaces
    `gpuResource`. Servers then need one too."""
    resources: Resources | None = None
    """Compute resources of the learner's container, besides GPUs."""
    template: PodTemplate = Field(default={})
    """Pod template to merge into the learner's, as `kubectl patch` does; its container is `learner`."""
    backoff_limit: Annotated[int, Field(ge=0, le=100)] = 3
    """Number of restarts of a failed learner, from its last checkpoint. A configuration error is never retried."""
    start_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] = 3600
    """Seconds from the choice of a node until all servers answer and the learner starts, in colocate mode until the
    learner starts; after that the job fails. Waiting for a node or for quota does not count; in a JobSet the time
    begins with the first pod that gets a node, and anew with each further one."""


class Placement(KubernetesObject):
    """Where servers and learner run: all on one node, or with engine JobSet where the scheduler or Kueue puts them."""

    node_selector: dict[QualifiedName, LabelValue] = Field(default={}, max_length=32)
    """Mapping of labels that the node must have."""
    affinity: Affinity | None = None
    """Node affinity, for choices that `nodeSelector` cannot express, such as one of several GPU models."""
    tolerations: list[Toleration] = Field(default=[], max_length=32)
    """List of taints that the pods tolerate."""
    priority_class_name: SubdomainOrNone = ""
    """Name of the pods' PriorityClass; empty means the cluster's default."""
    mode: Literal["Reserve", "Scheduler"] = "Reserve"
    """Who chooses the node: with `Reserve` the controller, which reserves room for the whole job; with `Scheduler` the
    scheduler, for clusters where an autoscaler adds nodes for pending pods, or volumes tie the job to certain nodes.
    Engine JobSet always leaves it to the scheduler, or to Kueue."""
    topology_key: QualifiedName | None = None
    """Node label whose values are domains of the network, such as racks (engine JobSet)."""
    topology: Literal["Preferred", "Exclusive"] = "Preferred"
    """How `topologyKey` is used: `Preferred` puts all pods of the job into one domain if it has room; `Exclusive` gives
    each rollout pod one domain, and all learner pods together one, without other JobSets of the same pod priority."""


class Tls(KubernetesObject):
    """TLS between servers, learner and controller, with certificates that the controller creates for the job."""

    enabled: bool = True
    """Whether servers and learner accept only TLS. Without it the job's token, images and answers cross the cluster's
    network in clear text."""


class Network(KubernetesObject):
    """Egress of the pods. Ingress is always limited to the job's own pods, the controller and Prometheus."""

    egress: Literal["Auto", "Closed", "Open"] = "Auto"
    """Allowed connections of servers and learner: `Closed`, only to each other and to DNS; `Open`, anywhere; `Auto`,
    open only if the job needs it: for a model or a sentence-embedding model on a hub, a tracker other than TensorBoard,
    or an extra container in a template. Other NetworkPolicies may allow more."""


class JobSpec(KubernetesObject):
    """Specification of the job."""

    engine: Literal["Node", "JobSet"] = "Node"
    """What runs the pods: `Node`, a Deployment and a Job on one node that stage2 chooses; `JobSet`, one JobSet over any
    number of nodes, for which JobSet restarts pods, and the scheduler or Kueue places and queues them."""
    suspend: bool = False
    """True removes the pods; edit the spec while the job is suspended, or in the same write. False resumes from the
    last checkpoint."""
    image: Image | None = None
    """Container image of servers and learner; unset means the image of the stage2 installation."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When nodes pull the image."""
    image_pull_secrets: list[ObjectReference] = Field(default=[], max_length=16)
    """List of Secrets with credentials for the image's registry."""
    gpu_resource: Annotated[
        str,
        StringConstraints(
            max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
        ),
    ] = "nvidia.com/gpu"
    """Resource name of GPUs on the nodes; empty for runs on the CPU. Containers with a ResourceClaimTemplate do not
    request it."""
    rollout: RolloutSpec = RolloutSpec()
    """Rollout servers: number, resources and ports."""
    learner: LearnerSpec = LearnerSpec()
    """Learner: GPUs, resources and retries."""
    tls: Tls = Tls()
    """Encryption of HTTP between servers, learner and controller."""
    network: Network = Network()
    """Limits on the pods' connections, if the cluster enforces NetworkPolicies."""
    placement: Placement = Placement()
    """Node choice for all pods: selector, tolerations, priority."""
    volumes: list[Volume] = Field(
        default=[],
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """List of volumes for model, data and output, mounted in every container."""
    eviction_limit: Annotated[int, Field(ge=0, le=1000)] = 10
    """Number of evictions of the job's pods by the kubelet, for lack of memory, disk or process IDs, after which the
    job starts again; one more fails it. Drains and preemptions do not count."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Seconds from its start or last resume until an unfinished job fails; unset means no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds from its end until the job is deleted; unset keeps it."""
    managed_by: (
        Annotated[
            str,
            StringConstraints(
                min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[-A-Za-z0-9_./]+)?$"
            ),
        ]
        | None
    ) = None
    """Name of the controller that manages the job. Unset or `stage2.dev/controller` means stage2; stage2 ignores jobs
    with any other value."""
    config: RunConfig
    """Training configuration: the YAML of `stage2 learn`, with its snake_case keys."""


class ObjectMeta(KubernetesObject):
    """The part of an object's metadata that stage2 reads."""

    model_config = ConfigDict(extra="ignore")

    name: Subdomain
    """Name of the job: at most 253 lower-case letters, digits, dashes and dots, no dash or dot next to a dot."""
    generate_name: SubdomainPrefix | None = None
    """Prefix of a name that the API server generates; it may end in a dash. Such a job is for `kubectl create`;
    locally, five `x` stand for the generated characters."""
    namespace: DnsLabel | None = None
    """Namespace of the job: at most 63 lower-case letters, digits and dashes, no dash first or last."""
    uid: str | None = None
    """Unique ID from the API server."""
    generation: int | None = None
    """Number that increases with each change of the spec."""
    labels: dict[str, str] | None = None
    """Mapping of labels."""
    annotations: dict[str, str] | None = None
    """Mapping of annotations."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """Generate a name from a prefix as the API server does, with `xxxxx` for its random characters."""
        prefix = value.get("generateName") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(prefix, str) or not prefix or value.get("name"):
            return value
        return {**value, "name": prefix[:LONGEST_PREFIX] + "xxxxx"}

    @field_validator("namespace", "generate_name", mode="before")
    @classmethod
    def _absent(cls, value: object) -> object:
        return None if value == "" else value  # as the API server has it


class RolloutMatchingJob(KubernetesObject):
    """A rollout-matching training run: rollout servers and a learner, on one node or in a JobSet."""

    api_version: Literal["stage2.dev/v1alpha1"]
    """Version of the schema of this object."""
    kind: Literal["RolloutMatchingJob"]
    """Kind of this object."""
    metadata: ObjectMeta
    """Name, namespace, labels."""
    spec: JobSpec
    """Specification of the job."""
    status: JobStatus | None = None
    """Status of the job, written by the controller."""
