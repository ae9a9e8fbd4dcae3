"""The stage of a job that goes on: which children may exist now, and which must not. Pure."""

from stage2_controller.job import kinds, kueue, reasons
from stage2_controller.job import status as statuses
from stage2_controller.job.children.meta import Manifest
from stage2_controller.job.desired import Desired
from stage2_controller.job.observed import Observed, terminating
from stage2_controller.job.situation import Situation

Manifests = tuple[Manifest, ...]


def stage(situation: Situation) -> tuple[Manifests, tuple[str, ...]]:
    """Return the children that may exist now, and the kinds that must not.

    A job that has no place has no children. A running job whose spec changed was suspended, edited and resumed faster
    than this pass came: it starts anew. Where nobody serves the job's queue nothing starts, and what runs goes on.
    """
    if situation.must_stop:
        return _without(_wanted(situation), *kinds.ROLE_OF_PODS), existing(situation.observed, "Job", "Deployment")
    if situation.quota and situation.quota.reason == reasons.KUEUE_DISABLED:
        return (), ()
    if (situation.placement and situation.placement.node is None) or not situation.admitted:
        return (), existing(situation.observed, "Job", "Deployment")
    return (_without(_wanted(situation), "Job") if _learner_waits(situation) else _wanted(situation)), ()


def shaped(situation: Situation) -> Desired:
    """Return the desired state with what Kueue's admission adds to the pods."""
    admitted = situation.quota is not None and situation.admitted
    return situation.desired.adding(kueue.additions(situation.observed)) if admitted else situation.desired


def existing(observed: Observed, *wanted: str) -> tuple[str, ...]:
    """Return those of the kinds of which there is a child that nobody has deleted yet."""
    return tuple(kind for kind in wanted if (there := observed.child(kind)) is not None and not terminating(there))


def _wanted(situation: Situation) -> Manifests:
    """Return all children, on the node that was chosen."""
    return shaped(situation).on(situation.placement.node if situation.placement else None)


def _learner_waits(situation: Situation) -> bool:
    """Return whether the learner's time has not come: an old one still ends, or its servers do not all answer yet."""
    if situation.observed.old_learner():
        return True
    starts = bool(situation.server_names) and situation.observed.learner is None
    return starts and statuses.rollout_finding(situation.observed, situation.server_names) is not None


def _without(manifests: Manifests, *unwanted: str) -> Manifests:
    return tuple(manifest for manifest in manifests if manifest["kind"] not in unwanted)
