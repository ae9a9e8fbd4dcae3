"""Kubernetes objects as plain JSON: look up a key, count resources, merge one pod template over another."""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stage2_api.kubernetes_types import QUANTITY


def value_at(value: Any, *keys: str) -> Any:
    """Return the value below these keys, whatever the shape of a person's text; None where a key is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


Amounts = Mapping[str, float]
"""Amounts by resource name, in base units: cores, bytes, pieces."""

_DECIMAL = {"n": "e-9", "u": "e-6", "m": "e-3", "k": "e3", "M": "e6", "G": "e9", "T": "e12", "P": "e15", "E": "e18"}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_FORM = re.compile(f"([+-]?){QUANTITY}")
_MOST = 1e300  # sums of more may be infinite


def parse_quantity(value: Any) -> float | None:
    """Return the amount in base units (cores, bytes, pieces); None if `value` is no quantity or has no finite sum.

    Two forms of one amount are equal: `1100m` and `1.1`.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        form = _FORM.fullmatch(str(value))
    except ValueError:  # a number of more digits than Python writes
        return None
    if form is None:
        return None
    sign, number, unit = form.groups("")
    amount = float(f"{sign}{number}{'' if unit in _BINARY else _DECIMAL.get(unit, unit)}") * _BINARY.get(unit, 1)
    return amount if abs(amount) <= _MOST else None


def show_quantity(resource: str, amount: float) -> str:
    """Return the amount as a person writes it: `3`, `0.5`, `12.5Gi` of memory."""
    if resource in ("memory", "ephemeral-storage"):
        return f"{amount / 2**30:.4g}Gi"
    return f"{amount:.6g}"


def parse_amounts(written: Mapping[str, Any]) -> dict[str, float]:
    """Return a resource list as numbers, without negative ones, which would make room of what others hold."""
    found = {key: parse_quantity(value) for key, value in written.items()}
    return {key: amount for key, amount in found.items() if amount is not None and amount >= 0}


def add_amounts(parts: Iterable[Amounts]) -> dict[str, float]:
    """Return the sum of amounts by resource."""
    total: dict[str, float] = {}
    for part in parts:
        for key, amount in part.items():
            total[key] = total.get(key, 0) + amount
    return total


def pod_requests(spec: Mapping[str, Any]) -> dict[str, float]:
    """Return what the scheduler reserves for a pod: the most that it needs at one time, and one pod.

    That is its containers beside its sidecars, or one init container beside the sidecars before it. Requests of the pod
    as a whole replace that sum (`PodRequests` of k8s.io/component-helpers/resource). A resize in place is not counted.
    """
    together = add_amounts(_container_requests(one) for one in spec.get("containers") or ())
    sidecars: dict[str, float] = {}
    most: dict[str, float] = {}
    for init in spec.get("initContainers") or ():
        running = add_amounts((sidecars, _container_requests(init)))
        most = _larger(most, running)
        if init.get("restartPolicy") == "Always":
            sidecars = running
    most = _larger(most, add_amounts((together, sidecars)))
    of_pod = spec.get("resources") or {}
    limits = {key: amount for key, amount in parse_amounts(of_pod.get("limits") or {}).items() if key not in most}
    overhead = parse_amounts(spec.get("overhead") or {})
    return {**add_amounts(({**most, **limits, **parse_amounts(of_pod.get("requests") or {})}, overhead)), "pods": 1}


def _container_requests(container: Mapping[str, Any]) -> dict[str, float]:
    resources = container.get("resources") or {}
    return parse_amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _larger(left: Amounts, right: Amounts) -> dict[str, float]:
    return {key: max(left.get(key, 0), right.get(key, 0)) for key in {**left, **right}}


# Kubernetes' own merge keys (`patchMergeKey` of core/v1). Every other list is replaced as a whole.
MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}


def strategic_merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `patch` over it, as `kubectl patch --type strategic` merges.

    Mappings merge, null removes a key, lists with a merge key merge by it.
    """
    merged = copy.deepcopy(dict(base))
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(key, merged.get(key), value)
    return merged


def _merge_value(key: str, old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return strategic_merge(old, new)
    merge_key = MERGE_KEYS.get(key)
    if merge_key and _keyed(old, merge_key) and _keyed(new, merge_key):
        return merge_by(merge_key, old, new)
    return copy.deepcopy(new)


def _keyed(value: Any, merge_key: str) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) and merge_key in item for item in value)


def merge_by(merge_key: str, old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return two lists of mappings as one: items with the same `merge_key` merge, other items of `new` follow."""
    merged: dict[Any, Any] = {item[merge_key]: item for item in old}
    for item in new:
        known = merged.get(item[merge_key])
        merged[item[merge_key]] = copy.deepcopy(item) if known is None else strategic_merge(known, item)
    return list(merged.values())
