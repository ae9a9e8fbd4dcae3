"""What a pod asks of its node, summed as the scheduler sums it. Pure.

Source: `PodRequests` of k8s.io/component-helpers/resource, and the API server's defaults for what a pod asks for as a
whole, both of Kubernetes 1.34.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from stage2_controller import conditions
from stage2_controller.observed import Object
from stage2_controller.spec import quantity
from stage2_controller.spec.quantity import Amounts

_OVERCOMMITTED = ("cpu", "memory")
_HUGE_PAGES = "hugepages-"
_NOTHING: Amounts = MappingProxyType({})
_NO_STATUS: Object = {}


def requests(
    spec: Mapping[str, Any],
    status: Mapping[str, Any] = _NO_STATUS,
    *,
    defaults: Amounts = _NOTHING,
    overhead: Amounts = _NOTHING,
) -> dict[str, float]:
    """Return what the scheduler reserves for a pod: the most that it needs at one time, and itself.

    That is its containers beside its sidecars, or one init container beside the sidecars before it. What the pod asks
    for as a whole takes the place of that. status: of a pod that runs, which may be resized. defaults: of a container
    that asks for nothing of a kind; overhead: of a pod that names none. A pod that the API server has taken has both in
    its spec.
    """
    resized = _Resized(status)
    together = added(resized.asked(one, defaults) for one in spec.get("containers") or ())
    beside: dict[str, float] = {}
    begun: dict[str, float] = {}
    for init in spec.get("initContainers") or ():
        if init.get("restartPolicy") == "Always":
            sidecar = resized.asked(init, defaults)
            together, beside = added((together, sidecar)), added((beside, sidecar))
            begun = _most((begun, beside))
        else:
            begun = _most((begun, added((beside, _asked(init, defaults)))))
    itself = amounts(spec.get("overhead") or {}) or overhead
    return {**added(({**_most((together, begun)), **_as_a_whole(spec)}, itself)), "pods": 1}


def amounts(written: Mapping[str, Any]) -> dict[str, float]:
    """Return the quantities of a resource list as numbers, without those that are none.

    Nor are negative ones: no pod or node has any, and one in a template would make room of what others hold.
    """
    return {
        key: amount for key, value in written.items() if (amount := quantity.parse(value)) is not None and amount >= 0
    }


def added(parts: Iterable[Amounts]) -> dict[str, float]:
    """Return the sum of amounts."""
    total: dict[str, float] = {}
    for part in parts:
        for key, amount in part.items():
            total[key] = total.get(key, 0) + amount
    return total


class _Resized:
    """What containers have while they are resized in place: what is asked for and what is still held both count."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        told = (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ()))
        self._held = {one["name"]: one for one in told if one.get("resources")}
        pending = conditions.find(status, "PodResizePending") if self._held else None
        self._never = bool(pending and pending["status"] == "True" and pending.get("reason") == "Infeasible")

    def asked(self, container: Mapping[str, Any], defaults: Amounts) -> dict[str, float]:
        written = _asked(container, defaults)
        told = self._held.get(container.get("name"))
        if told is None:
            return written
        held = amounts(told["resources"].get("requests") or {}), amounts(told.get("allocatedResources") or {})
        return _most(held if self._never else (written, *held))


def _asked(container: Mapping[str, Any], defaults: Amounts = _NOTHING) -> dict[str, float]:
    resources = container.get("resources") or {}
    return {**defaults, **amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})}


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
