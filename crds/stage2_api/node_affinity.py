"""Affinity to nodes, as a pod has it: which labels a node must have, and which are preferred.

Names and meaning are Kubernetes' own. Affinity to pods is not here: servers and learner follow each other.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stage2_api.kubernetes_types import LabelValue, QualifiedName
from stage2_api.section import KubernetesObject


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
