"""What a pod asks of its node, summed as the scheduler sums it. Pure.

Source: `PodRequests` of k8s.io/component-helpers/resource, and the API server's defaults for what a pod asks for as a
whole, both of Kubernetes 1.34.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from stage2_controller import conditions
from stage2_controller.observed import Object
from stage2_controller.spec import objects
from stage2_controller.spec.objects import Amounts

_OVERCOMMITTED = ("cpu", "memory")
_HUGE_PAGES = "hugepages-"
_NO_STATUS: Object = {}


def requests(spec: Mapping[str, Any], status: Mapping[str, Any] = _NO_STATUS) -> dict[str, float]:
    """Return what the scheduler reserves for a pod: the most that it needs at one time, and one pod.

    That is its containers beside its sidecars, or one init container beside the sidecars before it. Requests of the pod
    as a whole replace that sum. status: of a pod that runs, which may be resized.
    """
    resized = _Resized(status)
    together = added(resized.requests(one) for one in spec.get("containers") or ())
    beside: dict[str, float] = {}
    begun: dict[str, float] = {}
    for init in spec.get("initContainers") or ():
        if init.get("restartPolicy") == "Always":
            sidecar = resized.requests(init)
            together, beside = added((together, sidecar)), added((beside, sidecar))
            begun = _most((begun, beside))
        else:
            begun = _most((begun, added((beside, _asked(init)))))
    overhead = amounts(spec.get("overhead") or {})
    return {**added(({**_most((together, begun)), **_as_a_whole(spec)}, overhead)), "pods": 1}


def amounts(written: Mapping[str, Any]) -> dict[str, float]:
    """Return the quantities of a resource list as numbers, without those that are none.

    Nor are negative ones: no pod or node has any, and one in a template would make room of what others hold.
    """
    return {
        key: amount
        for key, value in written.items()
        if (amount := objects.parse_quantity(value)) is not None and amount >= 0
    }


def added(parts: Iterable[Amounts]) -> dict[str, float]:
    """Return the sum of amounts."""
    total: dict[str, float] = {}
    for part in parts:
        for key, amount in part.items():
            total[key] = total.get(key, 0) + amount
    return total


class _Resized:
    """The requests of containers that are resized in place: the new amount and the one still held both count."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        listed = (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ()))
        self._held = {one["name"]: one for one in listed if one.get("resources")}
        pending = conditions.find(status, "PodResizePending") if self._held else None
        self._never = bool(pending and pending["status"] == "True" and pending.get("reason") == "Infeasible")

    def requests(self, container: Mapping[str, Any]) -> dict[str, float]:
        written = _asked(container)
        status = self._held.get(container.get("name"))
        if status is None:
            return written
        held = amounts(status["resources"].get("requests") or {}), amounts(status.get("allocatedResources") or {})
        return _most(held if self._never else (written, *held))


def _asked(container: Mapping[str, Any]) -> dict[str, float]:
    resources = container.get("resources") or {}
    return amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _as_a_whole(spec: Mapping[str, Any]) -> dict[str, float]:
    """Return what counts in place of the containers' sum: a limit only where no container asks for any of it."""
    resources = spec.get("resources")
    if not resources:
        return {}
    whole = amounts(resources.get("requests") or {})
    asked = {key for one in _containers(spec) for key in _asked(one)}
    for key, amount in amounts(resources.get("limits") or {}).items():
        if key.startswith(_HUGE_PAGES) or (key in _OVERCOMMITTED and key not in asked):
            whole.setdefault(key, amount)
    return {key: amount for key, amount in whole.items() if key in _OVERCOMMITTED or key.startswith(_HUGE_PAGES)}


def _containers(spec: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))


def _most(parts: Iterable[Amounts]) -> dict[str, float]:
    """Return the largest amount of each kind."""
    most: dict[str, float] = {}
    for part in parts:
        for key, amount in part.items():
            most[key] = max(amount, most.get(key, amount))
    return most
