"""The children that exist, compared with those that are wanted: whose they are, and what has to be written. Pure.

A name proves nothing. A job that was deleted and applied again finds the children of the old one until the garbage
collector has removed them, and somebody may have created an object that happens to have such a name. So the owners'
uids decide whose a child is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from stage2_controller.children.manifest import Manifest
from stage2_controller.job import kinds, names
from stage2_controller.job.objects import MERGE_KEYS, parse_quantity
from stage2_controller.state import reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import Object, Observed, role_of, terminating

Whose = Literal["own", "former", "orphan", "foreign"]

LOOK_AGAIN_S = {reasons.OLD_CHILDREN_ENDING: 2.0, reasons.NAME_TAKEN: 15.0}
"""Seconds until the next look at what blocks a job; changes of watched objects start a pass at once."""
_PARENTS_OF_PODS = {names.ROLE_ROLLOUT: ("ReplicaSet", "Job"), names.ROLE_LEARNER: ("Job",)}


class Write(NamedTuple):
    """One write to the API server: `create` fails softly where the child exists, `apply` is a server-side apply."""

    verb: Literal["create", "apply"]
    manifest: Manifest


# --- Whose the children are. `job` is the metadata of the job.


def owned(seen: Observed, job: Mapping[str, Any]) -> Observed:
    """Return only what belongs to the job, beside the names of what does not."""
    found = {kind: (child, whose(child, job)) for kind in kinds.CHILD if (child := seen.child(kind)) is not None}
    owners = {kind: owner for kind, (_, owner) in found.items()}
    pods = {owner: [pod for pod in seen.pods if _whose_pod(pod, job, owners) == owner] for owner in ("own", "former")}
    others: dict[str, Any] = {kinds.CHILD[kind].field: None for kind, owner in owners.items() if owner != "own"}
    return replace(
        seen,
        **others,
        pods=tuple(pods["own"]),
        orphans=tuple(pod for pod in seen.pods if _is_orphan(pod, job)),
        leaving=(*_names_of(found, "former"), *(f"Pod {pod['metadata']['name']}" for pod in pods["former"])),
        unowned=_names_of(found, "orphan"),
        foreign=_names_of(found, "foreign"),
    )


def whose(child: Object, job: Mapping[str, Any]) -> Whose:
    """Return whether a child belongs to the job, to a former job of its name, to none any more, or to somebody else."""
    owner = controller_of(child)
    if owner is None and _annotation(child, names.ANNOTATION_JOB) == job["name"]:
        return "orphan"
    if owner is None or owner["kind"] != names.KIND or not owner["apiVersion"].startswith(f"{names.GROUP}/"):
        return "foreign"
    if owner["uid"] == job["uid"]:
        return "own"
    return "former" if owner["name"] == job["name"] else "foreign"


def controller_of(body: Object) -> Mapping[str, Any] | None:
    """Return the owner reference of an object's controller."""
    references: Sequence[Mapping[str, Any]] = body["metadata"].get("ownerReferences") or ()
    return next((item for item in references if item.get("controller")), None)


def _whose_pod(pod: Object, job: Mapping[str, Any], owners: Mapping[str, Whose]) -> Whose:
    """Decide by the uid in the pod's annotations, or by its Deployment or Job where an older controller wrote none.

    A pod that no object of the right kind controls was created by hand, whatever its annotations are.
    """
    metadata = pod["metadata"]
    role, controller = role_of(pod) or "", controller_of(pod)
    if controller is None or controller["kind"] not in _PARENTS_OF_PODS.get(role, ()):
        return "foreign"
    if uid := _annotation(pod, names.ANNOTATION_JOB_UID):
        return "own" if uid == job["uid"] else "former"
    if parent := owners.get(kinds.KIND_OF_ROLE[role]):
        return parent
    older = metadata.get("creationTimestamp", "") < job.get("creationTimestamp", "")
    return "former" if older else "own"


def _is_orphan(pod: Object, job: Mapping[str, Any]) -> bool:
    """Return whether a learner's pod outlived its Job (`kubectl delete job --cascade=orphan`).

    Somebody else may have created such a pod. The learner then waits for a pod whose creator could end the job anyway;
    two learners that write the same checkpoints would be worse.
    """
    is_ours = _annotation(pod, names.ANNOTATION_JOB_UID) == job["uid"]
    return is_ours and role_of(pod) == names.ROLE_LEARNER and controller_of(pod) is None


def _names_of(found: Mapping[str, tuple[Object, Whose]], wanted: Whose) -> tuple[str, ...]:
    return tuple(f"{kind} {child['metadata']['name']}" for kind, (child, owner) in found.items() if owner == wanted)


def obstacle(observed: Observed, namespace: str) -> Condition | None:
    """Return the condition ChildrenApplied where objects of others keep the job's children from being written."""
    if observed.unowned:
        objects = " ".join(name.replace(" ", "/").lower() for name in observed.unowned)
        message = (
            f"without an owner: {', '.join(observed.unowned)}; a job of this name was deleted with --cascade=orphan, or"
            f" `stage2 render` wrote them: kubectl delete -n {namespace} {objects}"
        )
        return Condition(reasons.CHILDREN_APPLIED, "False", reasons.NAME_TAKEN, message)
    if observed.foreign:
        exists = "exist and are" if len(observed.foreign) > 1 else "exists and is"
        message = f"{', '.join(observed.foreign)} {exists} not this job's; rename the job or the object"
        return Condition(reasons.CHILDREN_APPLIED, "False", reasons.NAME_TAKEN, message)
    if observed.leaving:
        message = f"waits for the children of a deleted job of this name to end: {', '.join(observed.leaving)}"
        return Condition(reasons.CHILDREN_APPLIED, "False", reasons.OLD_CHILDREN_ENDING, message)
    return None


# --- What has to be written.


def writes(children: Sequence[Manifest], observed: Observed) -> list[Write]:
    """Return the writes that make the observed children equal to `children`, in that order."""
    started = observed.learner is not None or observed.active()
    return [write for child in children if (write := _write(child, observed, started))]


def _write(child: Manifest, observed: Observed, started: bool) -> Write | None:
    existing, kind = observed.child(child["kind"]), kinds.CHILD[child["kind"]]
    if existing is None:
        return Write("create", child)  # an apply would take over an object that somebody gave this name meanwhile
    if terminating(existing) or kind.create_once or not _differs(child, existing, kind, started):
        return None
    return Write("apply", same(child, existing))


def same(child: Manifest, existing: Object) -> Manifest:
    """Return the child with the uid of the existing one, so that an apply fails if another object took its place."""
    uid = existing["metadata"].get("uid")
    return {**child, "metadata": {**child["metadata"], "uid": uid}} if uid else child


def _differs(child: Manifest, existing: Object, kind: kinds.ChildKind, started: bool) -> bool:
    def is_same(annotation: str) -> bool:
        return _annotation(existing, annotation) == _annotation(child, annotation)

    if kind.updated:
        return bool(existing["spec"].get(kind.updated) != child["spec"][kind.updated])
    if not is_same(names.ANNOTATION_SPEC_HASH):
        return True
    if not is_same(names.ANNOTATION_MANIFEST_HASH):
        # From another version of the controller: running pods must not notice an upgrade. The Service follows its pods.
        return not started or kind == kinds.SERVICE
    return not covers(existing, {key: child[key] for key in child if key not in ("apiVersion", "kind", "metadata")})


def spec_hash_of(child: Object | None) -> str | None:
    """Return the hash of the spec from which a child was built."""
    return _annotation(child, names.ANNOTATION_SPEC_HASH) if child is not None else None


def covers(observed: Any, wanted: Any, key: str = "") -> bool:
    """Return whether `observed` holds everything in `wanted`; what others added beside it does not count."""
    if observed is None:
        return _is_empty(wanted)  # the API server leaves out what is empty, zero or false
    if key == "selector":  # any label that somebody adds here selects other pods
        return bool(observed == wanted)
    if isinstance(wanted, Mapping):
        return isinstance(observed, Mapping) and all(
            covers(observed.get(name), value, name) for name, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return isinstance(observed, list | tuple) and _covers_list(observed, wanted, key)
    if observed == wanted and isinstance(observed, bool) == isinstance(wanted, bool):  # in Python true equals 1
        return True
    return parse_quantity(observed) == parse_quantity(wanted) is not None


def _covers_list(observed: Sequence[Any], wanted: Sequence[Any], key: str) -> bool:
    merge_key = MERGE_KEYS.get(key)
    if merge_key and all(isinstance(item, Mapping) and merge_key in item for item in (*observed, *wanted)):
        known = {item[merge_key]: item for item in observed}
        return all(item[merge_key] in known and covers(known[item[merge_key]], item) for item in wanted)
    return len(observed) == len(wanted) and all(map(covers, observed, wanted))


def _is_empty(value: Any) -> bool:
    return not value or (isinstance(value, Mapping) and all(map(_is_empty, value.values())))


def _annotation(body: Object, name: str) -> str | None:
    value: str | None = (body["metadata"].get("annotations") or {}).get(name)
    return value
