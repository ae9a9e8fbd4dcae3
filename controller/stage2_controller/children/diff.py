"""The difference between desired and observed children: what is absent, and what differs and may be mended."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from stage2_controller.children.manifest import Manifest
from stage2_controller.observed import Observed, terminating
from stage2_controller.spec import kinds, names, quantity
from stage2_controller.spec.strategic_merge import MERGE_KEYS

_CHOICE = "selector"  # a Service that is to choose no pods chooses some once anybody adds a label


class Write(NamedTuple):
    """One write to the API server: `create` fails softly where the child exists, `apply` is a server-side apply."""

    verb: Literal["create", "apply"]
    manifest: Manifest


def writes(children: Sequence[Manifest], observed: Observed) -> list[Write]:
    """Return the requests that make the observed children `children`, in that order; none if nothing has to change."""
    started = observed.learner is not None or observed.active()
    return [write for child in children if (write := _write(child, observed, started))]


def spec_changed(observed: Observed, spec_hash: str) -> bool:
    """Return whether the learner Job was made from another spec than the one with this hash."""
    return observed.learner is not None and _annotation(observed.learner, names.ANNOTATION_SPEC_HASH) != spec_hash


def covers(observed: Any, desired: Any, key: str = "") -> bool:
    """Return whether `observed` holds everything in `desired`; what others added beside it does not count."""
    if observed is None:
        return _empty(desired)  # the API server leaves out what is empty, zero or false
    if key == _CHOICE and not desired:
        return not observed
    if isinstance(desired, Mapping):
        return isinstance(observed, Mapping) and all(
            covers(observed.get(name), value, name) for name, value in desired.items()
        )
    if isinstance(desired, list | tuple):
        return isinstance(observed, list | tuple) and _covers_list(observed, desired, key)
    return _equal(observed, desired) or quantity.parse(observed) == quantity.parse(desired) is not None


def _equal(observed: Any, desired: Any) -> bool:
    """Return whether two JSON values are the same one; for Python true is 1, too."""
    return bool(observed == desired) and isinstance(observed, bool) == isinstance(desired, bool)


def _empty(value: Any) -> bool:
    return not value or (isinstance(value, Mapping) and all(map(_empty, value.values())))


def _write(child: Manifest, observed: Observed, started: bool) -> Write | None:
    there = observed.child(child["kind"])
    if there is None:
        return Write("create", child)  # an apply would take over what somebody else has given this name meanwhile
    if terminating(there) or kinds.CHILD[child["kind"]].create_once or not _differs(child, there, observed, started):
        return None
    return Write("apply", same(child, there))


def same(child: Manifest, there: Mapping[str, Any]) -> Manifest:
    """Return the child with the uid of what was seen: one that took its place meanwhile is not written over."""
    uid = there["metadata"].get("uid")
    return {**child, "metadata": {**child["metadata"], "uid": uid}} if uid else child


def _differs(child: Manifest, there: Mapping[str, Any], observed: Observed, started: bool) -> bool:
    def same(annotation: str) -> bool:
        return _annotation(there, annotation) == _annotation(child, annotation)

    if switches := kinds.CHILD[child["kind"]].switches:
        switched = any(there["spec"].get(switch, True) != child["spec"][switch] for switch in switches)
        return switched or not same(names.ANNOTATION_DEACTIVATED)
    if not same(names.ANNOTATION_SPEC_HASH):
        return True
    if not same(names.ANNOTATION_MANIFEST_HASH):
        return not started  # another version of the controller made it: running pods must not notice an upgrade
    return not covers(there, {key: child[key] for key in child if key not in ("apiVersion", "kind", "metadata")})


def _annotation(manifest: Mapping[str, Any], name: str) -> str | None:
    value: str | None = (manifest["metadata"].get("annotations") or {}).get(name)
    return value


def _covers_list(observed: Sequence[Any], desired: Sequence[Any], key: str) -> bool:
    merge_key = MERGE_KEYS.get(key)
    if merge_key and all(isinstance(item, Mapping) and merge_key in item for item in (*observed, *desired)):
        known = {item[merge_key]: item for item in observed}
        return all(item[merge_key] in known and covers(known[item[merge_key]], item) for item in desired)
    return len(observed) == len(desired) and all(map(covers, observed, desired))
