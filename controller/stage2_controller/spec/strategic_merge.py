"""Merging of a person's pod template over ours as `kubectl patch --type strategic` does: named things by name."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

# Kubernetes' own merge keys (the `patchMergeKey` of core/v1); every other list is replaced as a whole.
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
    """Return `base` with `patch` over it: mappings merge, null removes a key, keyed lists merge by key."""
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
    """Return two lists of mappings as one: items with the same `merge_key` merge, the rest of `new` follows."""
    merged: dict[Any, Any] = {item[merge_key]: item for item in old}
    for item in new:
        known = merged.get(item[merge_key])
        merged[item[merge_key]] = copy.deepcopy(item) if known is None else strategic_merge(known, item)
    return list(merged.values())
