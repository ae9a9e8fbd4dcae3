"""The ownership of objects with a child's name: the job's, a deleted job's of that name, or a stranger's. Pure.

A name is no proof. A job that was deleted and applied again at once finds the old one's children until the garbage
collector has been there, and somebody may have made an object that only happens to have such a name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from stage2_controller import reasons
from stage2_controller.children.manifest import Manifest
from stage2_controller.conditions import Condition
from stage2_controller.observed import Object, Observed, role_of, terminating
from stage2_controller.spec import kinds, names, objects
from stage2_controller.spec.objects import MERGE_KEYS

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
    return _equal(observed, desired) or objects.parse_quantity(observed) == objects.parse_quantity(desired) is not None


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


Whose = Literal["own", "former", "foreign"]

# Every change of a watched object starts a pass; the rest has to be asked for.
LOOK_AGAIN_S = {reasons.OLD_CHILDREN_ENDING: 2.0, reasons.NAME_TAKEN: 15.0}

_PARENT_OF_PODS = {names.ROLE_ROLLOUT: kinds.REPLICA_SET.kind, names.ROLE_LEARNER: kinds.LEARNER_JOB.kind}


def whose(child: Object, job: Mapping[str, Any]) -> Whose:
    """Return whose child it is, by its controller's uid; `job` is the metadata of the job."""
    owner = controller_of(child)
    if owner is None or owner["kind"] != names.KIND or not owner["apiVersion"].startswith(f"{names.GROUP}/"):
        return "foreign"
    if owner["uid"] == job["uid"]:
        return "own"
    return "former" if owner["name"] == job["name"] else "foreign"


def controller_of(body: Object) -> Mapping[str, Any] | None:
    """Return the owner reference of what controls an object."""
    references: Sequence[Mapping[str, Any]] = body["metadata"].get("ownerReferences") or ()
    return next((item for item in references if item.get("controller")), None)


def owned(seen: Observed, job: Mapping[str, Any]) -> Observed:
    """Return only what is the job's, beside the names of what is not; `job` is the metadata of the job."""
    found = {kind: (there, whose(there, job)) for kind in kinds.CHILD if (there := seen.child(kind)) is not None}
    told = {kind: owner for kind, (_, owner) in found.items()}
    pods = {owner: [pod for pod in seen.pods if _whose_pod(pod, job, told) == owner] for owner in ("own", "former")}
    others: dict[str, Any] = {kinds.CHILD[kind].field: None for kind, owner in told.items() if owner != "own"}
    return replace(
        seen,
        **others,
        pods=tuple(pods["own"]),
        orphans=tuple(pod for pod in seen.pods if _orphaned(pod, job)),
        leaving=(*_named(found, "former"), *(f"Pod {pod['metadata']['name']}" for pod in pods["former"])),
        foreign=_named(found, "foreign"),
    )


def after_namesakes(seen: Observed, job: Mapping[str, Any], others: Sequence[Object]) -> Observed:
    """Return what is seen, with the other jobs of the same label that came first in the way of this one.

    Names that are none for a Service are cut, and another job may be called what one of them became: both would be
    behind one NetworkPolicy, and one's learner beside the other's servers. job: the metadata of the job.
    """
    earlier = [one["metadata"] for one in others if _came(one["metadata"]) < _came(job)]
    return replace(seen, foreign=(*seen.foreign, *(f"{names.KIND} {one['name']}" for one in earlier)))


def _came(metadata: Mapping[str, Any]) -> tuple[str, str]:
    return metadata.get("creationTimestamp") or "", metadata["uid"]


def obstacle(observed: Observed) -> Condition | None:
    """Return the condition ChildrenApplied where what is not the job's keeps its children from being written."""
    if observed.foreign:
        exists = "exist and are" if len(observed.foreign) > 1 else "exists and is"
        message = f"{', '.join(observed.foreign)} {exists} not this job's; rename the job or the object"
        return Condition(reasons.CHILDREN_APPLIED, "False", reasons.NAME_TAKEN, message)
    if observed.leaving:
        message = f"waits for the end of what a deleted job of this name has left: {', '.join(observed.leaving)}"
        return Condition(reasons.CHILDREN_APPLIED, "False", reasons.OLD_CHILDREN_ENDING, message)
    return None


def _named(found: Mapping[str, tuple[Object, Whose]], wanted: Whose) -> tuple[str, ...]:
    return tuple(f"{kind} {there['metadata']['name']}" for kind, (there, owner) in found.items() if owner == wanted)


def _orphaned(pod: Object, job: Mapping[str, Any]) -> bool:
    """Return whether a learner's pod was left behind by its Job (`kubectl delete job --cascade=orphan`).

    It may be somebody's who only says so: then the learner waits for a pod whose maker may end the job anyway. Two
    learners that write the same checkpoints would be worse.
    """
    metadata = pod["metadata"]
    told = (metadata.get("annotations") or {}).get(names.ANNOTATION_JOB_UID) == job["uid"]
    return told and role_of(pod) == names.ROLE_LEARNER and controller_of(pod) is None


def _whose_pod(pod: Object, job: Mapping[str, Any], told: Mapping[str, Whose]) -> Whose:
    """Go by the uid that its template carries; one from before templates did is its Deployment's or Job's.

    One that nothing of the kind controls was made by hand, whatever it carries.
    """
    metadata = pod["metadata"]
    role, controller = role_of(pod) or "", controller_of(pod)
    if controller is None or controller["kind"] != _PARENT_OF_PODS.get(role):
        return "foreign"
    uid = (metadata.get("annotations") or {}).get(names.ANNOTATION_JOB_UID)
    if uid:
        return "own" if uid == job["uid"] else "former"
    parent = told.get(kinds.KIND_OF_ROLE[role])
    if parent:
        return parent
    older = metadata.get("creationTimestamp", "") < job.get("creationTimestamp", "")
    return "former" if older else "own"
