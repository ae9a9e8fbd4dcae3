"""The store of the watches: the newest state of all jobs and their children, so that a pass needs few requests."""

import json
from collections import defaultdict
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import orjson

from stage2_controller.job import kinds, names
from stage2_controller.job.names import Key
from stage2_controller.state.observed import Object


def read(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is no JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def write(value: object) -> bytes:
    """Return plain dictionaries, lists, texts and numbers as JSON, without spaces."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


# ConfigMaps and Secrets are read one by one instead.
_STORED = frozenset(resource.kind for resource in kinds.watched(kueue=True))


def key_of(kind: str, body: Object) -> Key | None:
    """Return the job that an object is or belongs to; None for one that only has our label."""
    metadata = body["metadata"]
    if kind not in _STORED:
        return None
    name = metadata["name"] if kind == names.KIND else metadata.get("annotations", {}).get(names.ANNOTATION_JOB)
    return Key(metadata["namespace"], name) if name else None


def version_of(body: Object) -> int:
    """Return the resource version: later writes of an object have greater ones."""
    return int(body["metadata"]["resourceVersion"])


class _Entry(NamedTuple):
    """One object. Children are kept as JSON, a fifth of their size as dictionaries; jobs as they are, for metrics."""

    name: str
    uid: str
    version: int
    kept: bytes | Object

    def body(self) -> Object:
        body: Object = read(self.kept) if isinstance(self.kept, bytes) else self.kept
        return body


class Store:
    """Objects by kind and job. An older state never replaces a newer one."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[Key, dict[str, _Entry]]] = {kind: defaultdict(dict) for kind in _STORED}
        self._owners: dict[str, Key] = {}  # by the uids of children

    def key(self, kind: str, body: Object) -> Key | None:
        """Return the job that an object is or belongs to, also where somebody took the annotation that says so."""
        return key_of(kind, body) or self._owners.get(body["metadata"]["uid"])

    def put(self, kind: str, body: Object) -> None:
        """Keep the object unless a newer state of it is known."""
        key = self.key(kind, body)
        if key is None:
            return
        before = self._owners.get(body["metadata"]["uid"], key)
        if before != key:
            self._drop(kind, before, body)
        siblings, metadata = self._objects[kind][key], body["metadata"]
        known, name = siblings.get(metadata["name"]), metadata["name"]
        if known is None or known.version <= version_of(body):
            slimmed = slim(kind, body)
            kept = slimmed if kind == names.KIND else write(slimmed)
            siblings[name] = _Entry(name, metadata["uid"], version_of(body), kept)
            if kind != names.KIND:
                self._owners[metadata["uid"]] = key

    def remove(self, kind: str, body: Object) -> None:
        """Forget the object, unless another one has taken its name."""
        key = self.key(kind, body)
        if key is not None:
            self._drop(kind, key, body)

    def _drop(self, kind: str, key: Key, body: Object) -> None:
        self._owners.pop(body["metadata"]["uid"], None)
        siblings = self._objects[kind].get(key, {})
        known = siblings.get(body["metadata"]["name"])
        if known is not None and known.uid == body["metadata"]["uid"]:
            del siblings[known.name]
            if not siblings:
                del self._objects[kind][key]

    def all(self, kind: str, key: Key) -> tuple[Object, ...]:
        """Return the objects of a kind that belong to a job."""
        return tuple(entry.body() for entry in self._objects[kind].get(key, {}).values())

    def one(self, kind: str, key: Key, name: str) -> Object | None:
        """Return the object of that name that belongs to a job."""
        entry = self._objects[kind].get(key, {}).get(name)
        return entry.body() if entry else None

    def knows(self, kind: str, body: Object) -> bool:
        """Return whether the object is known in this state or a newer one, or belongs to no job."""
        known = self.known_version(kind, body)
        return self.key(kind, body) is None or (known is not None and known >= version_of(body))

    def known_version(self, kind: str, body: Object) -> int | None:
        """Return the version in which the object of that name is known; None if it is not."""
        key = self.key(kind, body)
        known = self._objects[kind].get(key, {}).get(body["metadata"]["name"]) if key else None
        return known.version if known else None

    def vanished(self, kind: str, namespace: str | None, present: Container[str], list_version: int) -> list[Object]:
        """Return the known objects of a namespace, or of all, that a new list lacks. present: the uids in the list."""
        listed = (key for key in self._objects[kind] if namespace in (None, key.namespace))
        known = (entry for key in listed for entry in self._objects[kind][key].values())
        return [entry.body() for entry in known if entry.uid not in present and entry.version <= list_version]

    def all_of(self, kind: str) -> Iterator[Object]:
        """Return all objects of a kind."""
        return (entry.body() for siblings in self._objects[kind].values() for entry in siblings.values())


def slim(kind: str, body: Object) -> Object:
    """Return the object without managedFields, a third of its size, and a pod without most of its spec.

    A suspended job keeps its managedFields: they show who suspended it.
    """
    dropped = () if kind == names.KIND and body.get("spec", {}).get("suspend") else ("managedFields",)
    metadata: dict[str, Any] = {key: value for key, value in body["metadata"].items() if key not in dropped}
    slimmed = {**body, "metadata": metadata}
    kept = kinds.RESOURCES[kind].spec_fields
    if kept is not None:
        slimmed["spec"] = {key: value for key, value in body.get("spec", {}).items() if key in kept}
    return slimmed
