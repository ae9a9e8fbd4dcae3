"""The schema of a person's pod template: which parts are mappings or lists, checked before they are read."""

from collections.abc import Iterator, Mapping
from typing import Any

from stage2_api.errors import Problem
from stage2_controller.spec.strategic_merge import MERGE_KEYS

# Everything that is merged over something of ours, or read for placement. A wrong shape of the rest is told by the
# API server, and does no harm before.
_LISTS_OF_POD = (
    "containers",
    "initContainers",
    "volumes",
    "imagePullSecrets",
    "hostAliases",
    "topologySpreadConstraints",
    "tolerations",
)
_NAMED_ELSEWHERE = "containers"  # stage2_controller.spec.template_rules says what their names mean
_MAPPINGS_OF_POD = ("nodeSelector", "overhead", "securityContext")
_LISTS_OF_CONTAINER = ("env", "envFrom", "ports", "volumeMounts", "volumeDevices")
_MAPPINGS_OF_CONTAINER = ("resources", "securityContext")


def problems(path: str, template: Mapping[str, Any]) -> Iterator[Problem]:
    """Return every part of the template that has another shape than Kubernetes gives it; null counts as absent."""
    metadata, spec = template.get("metadata"), template.get("spec")
    yield from _mappings(path, template, ("metadata", "spec"))
    yield from _mappings(f"{path}.metadata", metadata, ("labels", "annotations"))
    yield from _mappings(f"{path}.spec", spec, _MAPPINGS_OF_POD)
    yield from _lists(f"{path}.spec", spec, _LISTS_OF_POD)
    for index, volume in enumerate(_listed(spec, "volumes")):
        yield from _volume(f"{path}.spec.volumes[{index}]", volume)
    for key in ("containers", "initContainers"):
        for index, container in enumerate(_listed(spec, key)):
            yield from _container(f"{path}.spec.{key}[{index}]", container)


def _listed(parent: Any, key: str) -> list[Any]:
    written = parent.get(key) if isinstance(parent, Mapping) else None
    return written if isinstance(written, list) else []


def _volume(path: str, volume: Any) -> Iterator[Problem]:
    yield from _mappings(path, volume, ("projected",))
    projected = volume.get("projected") if isinstance(volume, Mapping) else None
    yield from _lists(f"{path}.projected", projected, ("sources",))
    for index, source in enumerate(_listed(projected, "sources")):
        yield from _mappings(f"{path}.projected.sources[{index}]", source, ("serviceAccountToken",))


def _container(path: str, container: Any) -> Iterator[Problem]:
    yield from _mappings(path, container, _MAPPINGS_OF_CONTAINER)
    yield from _lists(path, container, _LISTS_OF_CONTAINER)
    if isinstance(container, Mapping):
        yield from _mappings(f"{path}.resources", container.get("resources"), ("limits", "requests"))


def _mappings(path: str, parent: Any, keys: tuple[str, ...]) -> Iterator[Problem]:
    for key in keys if isinstance(parent, Mapping) else ():
        value = parent.get(key)
        if value is not None and not isinstance(value, Mapping):
            yield Problem(f"{path}.{key}", value, "must be a mapping", "write its fields as `key: value` under it")


def _lists(path: str, parent: Any, keys: tuple[str, ...]) -> Iterator[Problem]:
    for key in keys if isinstance(parent, Mapping) else ():
        value, merge_key = parent.get(key), None if key == _NAMED_ELSEWHERE else MERGE_KEYS.get(key)
        way_out = f"begin each item with `- {merge_key}:`" if merge_key else "write each item as `- key: value`"
        if value is not None and not isinstance(value, list):
            yield Problem(f"{path}.{key}", value, "must be a list", way_out)
        elif value is not None:
            for index, item in enumerate(value):
                yield from _item(f"{path}.{key}[{index}]", item, merge_key, number=key == "ports", way_out=way_out)


def _item(path: str, item: Any, merge_key: str | None, *, number: bool, way_out: str) -> Iterator[Problem]:
    if not isinstance(item, Mapping):
        yield Problem(path, item, "must be a mapping", way_out)
    elif merge_key and not _is_key(item.get(merge_key), number=number):
        found = "a number" if number else "text"
        yield Problem(f"{path}.{merge_key}", item.get(merge_key), f"must be {found}", way_out)


def _is_key(value: Any, *, number: bool) -> bool:
    return isinstance(value, int) if number else isinstance(value, str) and value != ""
