"""Parts of a job that become parts of its pods: volumes, resources, tolerations, affinity to nodes, templates.

Names and meanings are those of Kubernetes. There is no pod affinity, because servers and learner share a node anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from stage2_api.section import DnsLabel, KubernetesObject, Name, Path, free_mapping

QUANTITY = r"([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?"
"""The form of an amount without a sign: its number, and its exponent or unit."""

_QUANTITY = f"^[+]?{QUANTITY}$"

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
    """Mapping of each resource to its minimum amount, such as `{cpu: 8, memory: 64Gi}`."""
    limits: dict[QualifiedName, Quantity] | None = Field(None, max_length=32)
    """Mapping of each resource to its maximum amount."""


class Toleration(KubernetesObject):
    """A taint that the pods tolerate."""

    key: QualifiedName | None = None
    """Key of the taint; unset with operator Exists tolerates every taint."""
    operator: Literal["Exists", "Equal"] | None = None
    """Comparison of the value: `Equal` (default), or `Exists` for any value."""
    value: LabelValue | None = None
    """Value of the taint, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; unset means all effects."""
    toleration_seconds: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    """Seconds that pods stay on a node with a NoExecute taint; unset means forever."""


class NodeSelectorRequirement(KubernetesObject):
    """A requirement on one label of a node."""

    key: QualifiedName
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """Comparison of the label with `values`; `Gt` and `Lt` compare whole numbers."""
    values: list[LabelValue] = Field(default=[], max_length=32)
    """List of values: at least one for `In` and `NotIn`, one whole number for `Gt` and `Lt`, none for the others."""


class NodeSelectorTerm(KubernetesObject):
    """Requirements that a node must meet together."""

    match_expressions: list[NodeSelectorRequirement] = Field(min_length=1, max_length=16)
    """List of requirements; a node must meet all of them."""


class NodeSelector(KubernetesObject):
    """Alternative requirements on a node."""

    node_selector_terms: list[NodeSelectorTerm] = Field(min_length=1, max_length=8)
    """List of terms; a node must meet at least one."""


class PreferredNodes(KubernetesObject):
    """A preference for some nodes."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """Weight from 1 to 100; a node's score is the sum of the weights of the preferences that it meets."""
    preference: NodeSelectorTerm
    """Requirements on the preferred nodes."""


class NodeAffinity(KubernetesObject):
    """Required and preferred nodes."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Requirements on the node."""
    preferred_during_scheduling_ignored_during_execution: list[PreferredNodes] = Field(default=[], max_length=8)
    """List of preferences among nodes with room; the highest score wins."""


class Affinity(KubernetesObject):
    """Affinity of the job."""

    node_affinity: NodeAffinity | None = None
    """Node affinity, by labels."""


class ClaimSource(KubernetesObject):
    """A PersistentVolumeClaim."""

    claim_name: Name
    """Name of the PersistentVolumeClaim in the job's namespace."""
    read_only: bool = False
    """Whether the claim is mounted read-only."""


class HostPathSource(KubernetesObject):
    """A folder of the node."""

    path: Path
    """Path on the node."""
    type: Literal["", "Directory", "DirectoryOrCreate", "File", "FileOrCreate"] = ""
    """Required type of the path; empty means any."""


class EmptyDirSource(KubernetesObject):
    """An empty folder that lives as long as the pod. Servers and learner get separate folders."""

    medium: Literal["", "Memory"] = ""
    """Storage medium: the node's disk (empty) or its memory."""
    size_limit: Quantity | None = None
    """Maximum size, such as 16Gi; unset means no limit."""


class ConfigMapSource(KubernetesObject):
    """A ConfigMap with one file per key."""

    name: Name
    """Name of the ConfigMap in the job's namespace."""
    optional: bool = False
    """Whether the pods may start without it."""


class SecretSource(KubernetesObject):
    """A Secret with one file per key."""

    secret_name: Name
    """Name of the Secret in the job's namespace."""
    optional: bool = False
    """Whether the pods may start without it."""


class NfsSource(KubernetesObject):
    """A folder of an NFS server."""

    server: Name
    """Host name or address of the NFS server."""
    path: Path
    """Path exported by the NFS server."""
    read_only: bool = False
    """Whether the folder is mounted read-only."""


class Volume(KubernetesObject):
    """A volume in every container of servers and learner, from exactly one source."""

    name: DnsLabel
    """Name of the volume, unique in the job."""
    mount_path: MountPath
    """Path in the containers, which the paths in `config` refer to."""
    read_only: bool = False
    """Whether the volume is read-only in the containers."""
    sub_path: Path | None = None
    """Path inside the volume to mount instead of its root."""
    persistent_volume_claim: ClaimSource | None = None
    """PersistentVolumeClaim as the source. ReadWriteOnce is enough for engine Node, whose pods share a node."""
    host_path: HostPathSource | None = None
    """Folder of the node as the source."""
    empty_dir: EmptyDirSource | None = None
    """Empty folder as the source, one per pod, deleted with the pod."""
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
