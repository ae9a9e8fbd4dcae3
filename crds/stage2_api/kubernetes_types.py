"""Parts of a job that become parts of its pods: volumes, resources, tolerations, affinity to nodes, templates.

Names and meaning are Kubernetes' own. Affinity to pods is missing on purpose: servers and learner follow each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from stage2_api.section import DnsLabel, KubernetesObject, Name, Path, free_mapping

_QUANTITY = r"^[+]?[0-9.]+([eE][+-]?[0-9]+|[numkMGTPE]i?)?$"

Quantity = Annotated[
    int | Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=_QUANTITY)],
    Field(json_schema_extra={"x-stage2-schema": {"x-kubernetes-int-or-string": True, "pattern": _QUANTITY}}),
]
"""An amount in Kubernetes' form: 2, "500m", 16Gi."""

QualifiedName = Annotated[str, StringConstraints(min_length=1, max_length=316)]
"""A label key or resource name, with an optional domain before it."""

LabelValue = Annotated[str, StringConstraints(max_length=63)]
"""A label value."""

MountPath = Annotated[Path, StringConstraints(pattern=r"^/[^:]*$")]
"""An absolute path in the containers."""

PodTemplate = Annotated[dict[str, Any], Field(json_schema_extra={"x-stage2-schema": free_mapping(8)}, max_length=8)]
"""A pod template (`metadata` and `spec`), whose keys are Kubernetes' own."""


class ObjectReference(KubernetesObject):
    """An object of the same namespace."""

    name: Name
    """Name of the object."""


class Resources(KubernetesObject):
    """Compute resources of one container, besides GPUs."""

    requests: dict[QualifiedName, Quantity] | None = Field(None, max_length=32)
    """Mapping from a resource to the amount that the container is given at least, such as `{cpu: 8, memory: 64Gi}`."""
    limits: dict[QualifiedName, Quantity] | None = Field(None, max_length=32)
    """Mapping from a resource to the amount that the container gets at most."""


class Toleration(KubernetesObject):
    """A taint that the pods accept on their node."""

    key: QualifiedName | None = None
    """Key of the taint; unset with operator Exists accepts every taint."""
    operator: Literal["Exists", "Equal"] | None = None
    """How the value is compared: `Equal` (default) or `Exists`, which takes any value."""
    value: LabelValue | None = None
    """Value of the taint, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; unset accepts all effects."""
    toleration_seconds: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    """Seconds that pods stay on a node with a NoExecute taint; unset means for ever."""


class NodeSelectorRequirement(KubernetesObject):
    """What one label of a node must be."""

    key: QualifiedName
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How the label is compared with `values`; `Gt` and `Lt` compare whole numbers."""
    values: list[LabelValue] = Field(default=[], max_length=32)
    """List of values: at least one for `In` and `NotIn`, one whole number for `Gt` and `Lt`, none for the others."""


class NodeSelectorTerm(KubernetesObject):
    """Labels that a node must have, all of them."""

    match_expressions: list[NodeSelectorRequirement] = Field(min_length=1, max_length=16)
    """List of requirements, all of which a node must meet."""


class NodeSelector(KubernetesObject):
    """Kinds of nodes, of which any will do."""

    node_selector_terms: list[NodeSelectorTerm] = Field(min_length=1, max_length=8)
    """List of terms, one of which a node must meet."""


class PreferredNodes(KubernetesObject):
    """A kind of nodes that is better than others."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """How much better, from 1 to 100: a node has the sum of all that it meets."""
    preference: NodeSelectorTerm
    """Labels of these nodes."""


class NodeAffinity(KubernetesObject):
    """Nodes on which the job may run, and those that it prefers."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """What a node must be, in terms of which one has to be met."""
    preferred_during_scheduling_ignored_during_execution: list[PreferredNodes] = Field(default=[], max_length=8)
    """List of preferences among nodes that have room; the heaviest sum wins."""


class Affinity(KubernetesObject):
    """What the job's node must be, in more words than a nodeSelector has."""

    node_affinity: NodeAffinity | None = None
    """Affinity to nodes by their labels."""


class ClaimSource(KubernetesObject):
    """A PersistentVolumeClaim."""

    claim_name: Name
    """Name of the PersistentVolumeClaim in the job's namespace."""
    read_only: bool = False
    """Whether the claim is attached for reading only."""


class HostPathSource(KubernetesObject):
    """A folder of the node."""

    path: Path
    """Path on the node."""
    type: Literal["", "Directory", "DirectoryOrCreate", "File", "FileOrCreate"] = ""
    """What must lie at the path; empty means that nothing is checked."""


class EmptyDirSource(KubernetesObject):
    """An empty folder that lives as long as the pod. Rollout servers and learner each get one of their own."""

    medium: Literal["", "Memory"] = ""
    """Where it lies: the node's disk (empty) or its memory."""
    size_limit: Quantity | None = None
    """Amount that it may hold, such as 16Gi; unset means no limit."""


class ConfigMapSource(KubernetesObject):
    """A ConfigMap, one file a key."""

    name: Name
    """Name of the ConfigMap in the job's namespace."""
    optional: bool = False
    """Whether the pods start without it."""


class SecretSource(KubernetesObject):
    """A Secret, one file a key."""

    secret_name: Name
    """Name of the Secret in the job's namespace."""
    optional: bool = False
    """Whether the pods start without it."""


class NfsSource(KubernetesObject):
    """A folder of an NFS server."""

    server: Name
    """Host name or address of the NFS server."""
    path: Path
    """Path exported by the NFS server."""
    read_only: bool = False
    """Whether it is mounted for reading only."""


class Volume(KubernetesObject):
    """Files for the containers of servers and learner alike, from exactly one source."""

    name: DnsLabel
    """Name of the volume, unique in the job."""
    mount_path: MountPath
    """Path in the containers; `config` names model, data and output by it."""
    read_only: bool = False
    """Whether containers can only read it."""
    sub_path: Path | None = None
    """Path inside the volume that is mounted instead of its root."""
    persistent_volume_claim: ClaimSource | None = None
    """PersistentVolumeClaim as the source. Servers and learner share a node, so ReadWriteOnce is enough."""
    host_path: HostPathSource | None = None
    """Folder of the node as the source."""
    empty_dir: EmptyDirSource | None = None
    """Empty folder as the source, one for each pod; gone with the pod."""
    config_map: ConfigMapSource | None = None
    """ConfigMap as the source."""
    secret: SecretSource | None = None
    """Secret as the source."""
    nfs: NfsSource | None = None
    """NFS folder as the source."""

    @property
    def source(self) -> dict[str, Any]:
        """The volume's source as a pod has it: `{"hostPath": {"path": "/data"}}`."""
        return self.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude={"name", "mount_path", "read_only", "sub_path"}
        )
