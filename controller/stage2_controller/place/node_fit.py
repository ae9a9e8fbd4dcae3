"""The fit of a whole job, servers and learner, on one node, before any of its pods exists. Pure.

The node is chosen once for both pods. The scheduler still binds them, and decides about preemption. What the terms of a
pod's nodeAffinity mean is the scheduler's too (k8s.io/component-helpers, nodeaffinity).
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stage2_controller.job import objects
from stage2_controller.job.objects import Amounts, add_amounts, pod_requests
from stage2_controller.state.observed import Object

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_BLOCKING = ("NoSchedule", "NoExecute")
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_CORDON: Object = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}  # written a moment later
HOSTNAME = "kubernetes.io/hostname"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
_OF_KARPENTER = "karpenter.sh/nodepool"
_LISTED = 3  # nodes that a message names

Avoided = tuple[tuple[str, str], ...]
"""Labels of nodes, as pairs of key and value."""


@dataclass(frozen=True)
class PodNeed:
    """The need of one pod of a job: its requests, and where it may run."""

    role: str
    requests: Amounts
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    affinity: Mapping[str, Any] = field(default_factory=dict)  # to nodes


@dataclass(frozen=True)
class Need:
    """The need of a whole job: everything that it requests from one node."""

    pods: tuple[PodNeed, ...]
    priority: int = 0
    preempts: bool = True  # the PriorityClass' preemptionPolicy
    gpu_resource: str = ""
    host: str | None = None  # the only node that it may have, by its label kubernetes.io/hostname

    @property
    def total(self) -> Amounts:
        """The sum over all pods."""
        return add_amounts(pod.requests for pod in self.pods)


@dataclass(frozen=True)
class NodeInfo:
    """One node: what it is, and what is free on it for the job in question."""

    name: str
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, Any]]
    ready: bool
    cordoned: bool
    free: Amounts
    free_by_preemption: Amounts  # what is free after every pod of lower priority is evicted
    allocatable: Amounts = field(default_factory=dict)  # what is free beside the pods that every such node has
    refused: bool = False  # an earlier attempt of the job failed there: others are tried first

    @property
    def out_of_service(self) -> bool:
        """Whether somebody has declared that nothing runs on the node any more."""
        return any(taint.get("key") == _OUT_OF_SERVICE for taint in self.taints)


def need_of(templates: Mapping[str, Mapping[str, Any]], *, gpu_resource: str) -> Need:
    """Return what pods made from these templates, by role, need on one node, as the scheduler counts it."""
    pods = tuple(
        PodNeed(
            role=role,
            requests=pod_requests(spec := template["spec"]),
            node_selector=spec.get("nodeSelector") or {},
            tolerations=spec.get("tolerations") or (),
            affinity=(spec.get("affinity") or {}).get("nodeAffinity") or {},
        )
        for role, template in templates.items()
    )
    return Need(pods=pods, gpu_resource=gpu_resource)


def with_priority(need: Need, priority_class: Object | None) -> Need:
    """Return the need with the priority of this PriorityClass; None: of no class."""
    if priority_class is None:
        return need
    preempts = priority_class.get("preemptionPolicy") != "Never"
    return replace(need, priority=priority_class["value"], preempts=preempts)


def choose_node(need: Need, nodes: Sequence[NodeInfo]) -> str | None:
    """Return the node that takes the whole job; by preemption only if none has room. None: `why_none_fits` says why.

    Nodes that refused the job, and others of their zones, come last. Then the job's preferences decide, then the
    fullest node is taken, so that large rooms stay.
    """
    total = need.total
    zones = {info.labels.get(ZONE) for info in nodes if info.refused} - {None}
    for preempting in (False, True) if need.preempts else (False,):
        roomy = [info for info in nodes if _has(_free(info, preempting), total)]
        found = [info for info in roomy if _refusal(need, info) is None]
        if found:
            best = min(
                found,
                key=lambda info: (
                    info.refused,
                    info.labels.get(ZONE) in zones,
                    -sum(affinity_weight(pod.affinity, info.labels) for pod in need.pods),
                    *_remaining(_free(info, preempting), total, need.gpu_resource),
                    info.name,
                ),
            )
            return best.name
    return None


def half_rooms(need: Need, nodes: Sequence[NodeInfo]) -> Avoided:
    """Return labels of the nodes that pods without a node must avoid: the scheduler could bind the servers alone there.

    Those are nodes that are large enough for the servers, by their host, so that nothing that is promised to another
    job is taken. Closed ones count too: they open again. Karpenter ignores pods that name hosts. Where a node carries
    its label, only open nodes count that have room for the servers now or by preemption, and a node of an instance type
    that is too small for the whole job is named by that type.
    """
    if len(need.pods) < 2:
        return ()
    first = need.pods[0].requests
    named = [info for info in nodes if HOSTNAME in info.labels and not any(_elsewhere(pod, info) for pod in need.pods)]
    if not any(_OF_KARPENTER in info.labels for info in nodes):
        large_enough = [info for info in named if _has(info.allocatable, first) or _has(_most_free(need, info), first)]
        return tuple(sorted((HOSTNAME, info.labels[HOSTNAME]) for info in large_enough))
    large = {info.labels.get(INSTANCE_TYPE) for info in nodes if _has(info.allocatable, need.total)}
    open_now = [info for info in named if not any(_kept_off(pod, info) for pod in need.pods)]
    return tuple(sorted({_type_or_host(info, large) for info in open_now if _has(_most_free(need, info), first)}))


def _most_free(need: Need, info: NodeInfo) -> Amounts:
    """Return what the scheduler may give the job there: it preempts for one pod regardless of the other."""
    return _free(info, need.preempts)


def _type_or_host(info: NodeInfo, large: Container[str | None]) -> tuple[str, str]:
    """Return the label by which pods may avoid the node: its type's, if all of that type are too small."""
    key = HOSTNAME if info.labels.get(INSTANCE_TYPE) in large or INSTANCE_TYPE not in info.labels else INSTANCE_TYPE
    return key, info.labels[key]


def may_use(need: Need, info: NodeInfo) -> bool:
    """Return whether the node is the host that the job is tied to, where it is tied to one."""
    return need.host is None or info.labels.get(HOSTNAME) == need.host


def why_none_fits(need: Need, nodes: Sequence[NodeInfo]) -> str:
    """Return why no node takes the job: what is missing, and the node that comes closest."""
    if not nodes:
        return "the cluster has no nodes"
    allowed = [info for info in nodes if may_use(need, info)]
    if not allowed:
        return f"Kueue assigned the host {need.host}, and no node has the label {HOSTNAME}={need.host}"
    fitting = [info for info in allowed if _refusal(need, info) is None]
    if not fitting:
        return _none_usable(need, allowed)
    return _lacks_alone(need, fitting) or _lacks_together(need, fitting)


def _none_usable(need: Need, nodes: Sequence[NodeInfo]) -> str:
    first = sorted(nodes, key=lambda info: info.name)[:_LISTED]
    refusals = "; ".join(f"{info.name} {_refusal(need, info)}" for info in first)
    more = f", and {len(nodes) - _LISTED} more nodes" if len(nodes) > _LISTED else ""
    return f"no node may be used: {refusals}{more}"


def _lacks_alone(need: Need, fitting: Sequence[NodeInfo]) -> str | None:
    """Name the first resource of which no node has enough; None if some node has enough of each."""
    total = need.total
    for resource in _in_order(total, need.gpu_resource):
        best = max(fitting, key=lambda info: (info.free.get(resource, 0), info.name))
        if _lacks(best.free, resource, total[resource]):
            needed, free = objects.show_quantity(resource, total[resource]), _free_quantity(resource, best)
            return f"needs {needed} {resource} on one node; the largest free is {free} on {best.name}"
    return None


def _lacks_together(need: Need, fitting: Sequence[NodeInfo]) -> str:
    """Name what the node that has most of it lacks."""
    total = need.total
    resources = _in_order(total, need.gpu_resource)
    best = max(fitting, key=lambda info: (sum(not _lacks(info.free, k, total[k]) for k in resources), info.name))
    lacking = next(key for key in resources if _lacks(best.free, key, total[key]))
    wanted = ", ".join(f"{objects.show_quantity(key, total[key])} {key}" for key in resources)
    return f"needs {wanted} together on one node; {best.name} has only {_free_quantity(lacking, best)} {lacking} free"


def _free_quantity(resource: str, info: NodeInfo) -> str:
    return objects.show_quantity(resource, max(info.free.get(resource, 0), 0))


def _in_order(total: Amounts, gpu_resource: str) -> list[str]:
    first = [gpu_resource, "cpu", "memory"]
    return [key for key in (*first, *sorted(set(total) - set(first))) if total.get(key)]


def _free(info: NodeInfo, preempting: bool) -> Amounts:
    return info.free_by_preemption if preempting else info.free


def _has(free: Amounts, total: Amounts) -> bool:
    return not any(_lacks(free, key, amount) for key, amount in total.items())


def _lacks(free: Amounts, key: str, amount: float) -> bool:
    """Return the scheduler's answer: a request of zero fits an overbooked node too."""
    return amount > 0 and free.get(key, 0) < amount - 1e-9  # sums of 0.1 are not exact


def _remaining(free: Amounts, total: Amounts, gpu_resource: str) -> tuple[float, float]:
    """Return the GPUs and cores that remain free beside the job."""
    gpus, cores = (free.get(key, 0) - total.get(key, 0) for key in (gpu_resource, "cpu"))
    return gpus, cores


def _refusal(need: Need, info: NodeInfo) -> str | None:
    """Return why no pod of the job may be on the node, however empty it is; None if they may."""
    if not may_use(need, info):
        return f"is not the host {need.host}, which Kueue assigned"
    if not info.ready:
        return "is not ready"
    if info.cordoned:
        return "is cordoned (kubectl uncordon)"
    return next(filter(None, (_elsewhere(pod, info) or _kept_off(pod, info) for pod in need.pods)), None)


def _elsewhere(pod: PodNeed, info: NodeInfo) -> str | None:
    """Return why the pod's selectors exclude the node; None if they do not."""
    for key, value in pod.node_selector.items():
        if info.labels.get(key) != value:
            return f"lacks the label {key}={value} (spec.placement.nodeSelector)"
    if not affinity_takes(pod.affinity, info.labels):
        return f"is none of {show_affinity(pod.affinity)} (spec.placement.affinity)"
    return None


def _kept_off(pod: PodNeed, info: NodeInfo) -> str | None:
    """Return the taint that keeps the pod off the node; None if there is none. A cordon is one of them."""
    for taint in (*info.taints, _CORDON) if info.cordoned else info.taints:
        if taint["effect"] in _BLOCKING and not any(_tolerates(item, taint) for item in pod.tolerations):
            text = f"{taint['key']}={taint.get('value', '')}:{taint['effect']}"
            return f"has the taint {text} (spec.placement.tolerations)"
    return None


def _tolerates(toleration: Mapping[str, Any], taint: Object) -> bool:
    """Return the scheduler's answer; a missing key with operator Exists tolerates everything."""
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint["key"]:
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (taint.get("value") or "")


def affinity_takes(affinity: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a node with these labels meets one of the required terms, or none is required."""
    required = affinity.get(REQUIRED)
    return required is None or any(_meets(term, labels) for term in required["nodeSelectorTerms"])


def affinity_weight(affinity: Mapping[str, Any], labels: Mapping[str, str]) -> int:
    """Return the sum of the weights of all preferences that a node meets."""
    preferred = affinity.get(PREFERRED) or ()
    return sum(one["weight"] for one in preferred if _meets(one["preference"], labels))


def narrowed_affinity(affinity: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return the affinity to those of its nodes that meet a further term as well."""
    terms: Sequence[Mapping[str, Any]] = (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    return {**affinity, REQUIRED: {"nodeSelectorTerms": [_both(term, further) for term in terms]}}


def show_affinity(affinity: Mapping[str, Any]) -> str:
    """Return the required terms as a person reads them: `gpu In (h100, a100), zone NotIn (b) or pool Exists`."""
    terms = affinity[REQUIRED]["nodeSelectorTerms"]
    return " or ".join(", ".join(map(_shown_term, term.get("matchExpressions") or ())) for term in terms)


def _both(term: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    return {**term, **{key: [*(term.get(key) or ()), *more] for key, more in further.items()}}


def _meets(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return all(_holds(one, labels.get(one["key"])) for one in term.get("matchExpressions") or ())


def _holds(one: Mapping[str, Any], label: str | None) -> bool:
    values: Sequence[str] = one.get("values") or ()
    match one["operator"]:
        case "In":
            return label in values
        case "NotIn":
            return label not in values
        case "Exists":
            return label is not None
        case "DoesNotExist":
            return label is None
        case "Gt":
            return _whole(label) and int(str(label)) > int(values[0])
        case _:
            return _whole(label) and int(str(label)) < int(values[0])


def _whole(label: str | None) -> bool:
    return label is not None and label.removeprefix("-").isdecimal()


def _shown_term(one: Mapping[str, Any]) -> str:
    values = ", ".join(one.get("values") or ())
    return f"{one['key']} {one['operator']}" + (f" ({values})" if values else "")
