"""What the API server adds to a job's pods before they are scheduled, as far as their place depends on it. Pure.

Sources: Kubernetes' admission plugins LimitRanger, RuntimeClass and Priority.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stage2_api.section import is_subdomain
from stage2_controller.observed import Object
from stage2_controller.place import pod_requests
from stage2_controller.place.node_fit import Need, PodNeed
from stage2_controller.spec.lookup import at
from stage2_controller.spec.quantity import Amounts

ROLES = ("rollout", "learner")
_NO_CLASS: Object = {"value": 0}  # of a pod that names none, where none is the default


@dataclass(frozen=True)
class PodDefaults:
    """What is added to pods of one job.

    requests: of each container that asks for nothing of a kind itself. runtime_classes, priority_classes: those that
    the job names, where they are. default_class: the PriorityClass of pods that name none; None = priority 0.
    """

    requests: Amounts = field(default_factory=dict)
    runtime_classes: Mapping[str, Object] = field(default_factory=dict)
    priority_classes: Mapping[str, Object] = field(default_factory=dict)
    default_class: Object | None = None

    def added_to(self, need: Need) -> Need:
        """Return the need of a job's pods with what is added to them, without the specs that it was read from."""
        classes: list[Object] = [self._class_of(pod) or _NO_CLASS for pod in need.pods]
        if classes:  # the learner's place has to last as long as the servers'
            least = min(found["value"] for found in classes)
            preempts = all(found.get("preemptionPolicy") != "Never" for found in classes)
            need = replace(need, priority=least, preempts=preempts)
        return replace(need, pods=tuple(replace(self._pod(pod), spec={}) for pod in need.pods))

    def _class_of(self, pod: PodNeed) -> Object | None:
        name = pod.spec.get("priorityClassName")
        return self.priority_classes.get(name) if name else self.default_class

    def _pod(self, pod: PodNeed) -> PodNeed:
        found = self.runtime_classes.get(pod.spec.get("runtimeClassName") or "")
        if found is None and not self.requests:
            return pod
        overhead, where = _part(found, "overhead", "podFixed"), _part(found, "scheduling")
        return replace(
            pod,
            requests=pod_requests.requests(pod.spec, defaults=self.requests, overhead=pod_requests.amounts(overhead)),
            node_selector={**pod.node_selector, **(where.get("nodeSelector") or {})},
            tolerations=(*pod.tolerations, *(where.get("tolerations") or ())),
        )


def default_requests(limit_ranges: Sequence[Object]) -> dict[str, float]:
    """Return what a container asks for that asks for nothing, in a namespace with these LimitRanges: the most of any.

    Which of several counts Kubernetes leaves open. Where only a default limit or a maximum was written, the API server
    has filled in `defaultRequest`.
    """
    found: dict[str, float] = {}
    for one in limit_ranges:
        for item in one["spec"].get("limits") or ():
            if item.get("type") == "Container":
                for name, amount in pod_requests.amounts(item.get("defaultRequest") or {}).items():
                    found[name] = max(amount, found.get(name, 0.0))
    return found


def default_of(priority_classes: Iterable[Object]) -> Object | None:
    """Return the PriorityClass of pods that name none: of several defaults the least."""
    defaults = [one for one in priority_classes if one.get("globalDefault")]
    return min(defaults, key=lambda one: one["value"], default=None)


def runtime_classes(spec: Mapping[str, Any]) -> set[str]:
    """Return the RuntimeClasses that a job's templates name, whatever else their shape is."""
    return _named(at(spec, role, "template", "spec", "runtimeClassName") for role in ROLES)


def priority_classes(spec: Mapping[str, Any]) -> set[str]:
    """Return the PriorityClasses that a job's placement and templates name, whatever else their shape is."""
    found = (at(spec, role, "template", "spec", "priorityClassName") for role in ROLES)
    return _named([*found, at(spec, "placement", "priorityClassName")])


def _named(found: Iterable[Any]) -> set[str]:
    """Return those that may be names: others are somebody's text, of which no request is made."""
    return {name for name in found if isinstance(name, str) and is_subdomain(name)}


def _part(value: Any, *keys: str) -> Mapping[str, Any]:
    return at(value, *keys) or {}
