"""The stage of a job that goes on: which children may exist now, and which must not. Pure."""

from stage2_controller.job import kinds, kueue, reasons
from stage2_controller.job import status as statuses
from stage2_controller.job.children.meta import Manifest
from stage2_controller.job.desired import Desired
from stage2_controller.job.observed import Observed, terminating
from stage2_controller.job.situation import Situation

Manifests = tuple[Manifest, ...]


def stage(found: Situation) -> tuple[Manifests, tuple[str, ...]]:
    """Return the children that may exist now, and the kinds that must not.

    A job that has no place has no children. A running job whose spec changed was suspended, edited and resumed faster
    than this pass came: it starts anew. Where nobody serves the job's queue nothing starts, and what runs goes on.
    """
    if found.must_stop:
        return _without(_wanted(found), *kinds.ROLE_OF_PODS), existing(found.observed, "Job", "Deployment")
    if found.quota and found.quota.reason == reasons.KUEUE_DISABLED:
        return (), ()
    if (found.placement and found.placement.node is None) or not found.admitted:
        return (), existing(found.observed, "Job", "Deployment")
    return (_without(_wanted(found), "Job") if _learner_waits(found) else _wanted(found)), ()


def shaped(found: Situation) -> Desired:
    """Return the desired state with what Kueue's admission adds to the pods."""
    admitted = found.quota is not None and found.admitted
    return found.desired.adding(kueue.additions(found.observed)) if admitted else found.desired


def existing(observed: Observed, *wanted: str) -> tuple[str, ...]:
    """Return those of the kinds of which there is a child that nobody has deleted yet."""
    return tuple(kind for kind in wanted if (there := observed.child(kind)) is not None and not terminating(there))


def _wanted(found: Situation) -> Manifests:
    """Return all children, on the node that was chosen."""
    return shaped(found).on(found.placement.node if found.placement else None)


def _learner_waits(found: Situation) -> bool:
    """Return whether the learner's time has not come: an old one still ends, or its servers do not all answer yet."""
    if found.observed.old_learner():
        return True
    starts = bool(found.server_names) and found.observed.learner is None
    return starts and statuses.rollout_finding(found.observed, found.server_names) is not None


def _without(manifests: Manifests, *unwanted: str) -> Manifests:
    return tuple(manifest for manifest in manifests if manifest["kind"] not in unwanted)
