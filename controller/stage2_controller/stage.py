"""The stage of a job that goes on: which children may exist now, and which must not. Pure."""

from stage2_controller import outcome, reasons
from stage2_controller.children.build import Additions, build
from stage2_controller.children.manifest import Manifest
from stage2_controller.observed import Observed, terminating
from stage2_controller.place import placement
from stage2_controller.queue import kueue
from stage2_controller.situation import Situation
from stage2_controller.spec import kinds

Manifests = tuple[Manifest, ...]


def stage(situation: Situation) -> tuple[Manifests, tuple[str, ...]]:
    """Return the children that may exist now, and the kinds that must not.

    A job that has no place has no children; one that has gets servers and learner in one pass, so that pods hold all of
    it. A learner waits only for the end of an old one. A running job whose spec changed was suspended, edited and
    resumed faster than this pass came: it starts anew. Where nobody serves the job's queue nothing starts, and what
    runs goes on. Servers whose learner cannot be made, its name being a stranger's, would load for nothing, and a
    learner would wait for servers that cannot.
    """
    if situation.blocked and situation.blocked.reason == reasons.NAME_TAKEN and _has_half(situation):
        return (), existing(situation.observed, "Job", "Deployment")
    if situation.must_stop:
        return _without(_wanted(situation), *kinds.ROLE_OF_PODS), existing(situation.observed, "Job", "Deployment")
    if situation.quota and situation.quota.reason == reasons.KUEUE_DISABLED:
        return (), ()
    if _has_no_place(situation) or not situation.admitted:
        return (), existing(situation.observed, "Job", "Deployment")
    return (_without(_wanted(situation), "Job") if situation.observed.old_learner() else _wanted(situation)), ()


def additions(situation: Situation) -> Additions:
    """Return what Kueue's admission adds to the pods."""
    admitted = situation.quota is not None and situation.admitted
    return kueue.additions(situation.observed) if admitted else {}


def existing(observed: Observed, *wanted: str) -> tuple[str, ...]:
    """Return those of the kinds of which there is a child that nobody has deleted yet."""
    return tuple(kind for kind in wanted if (there := observed.child(kind)) is not None and not terminating(there))


def _wanted(situation: Situation) -> Manifests:
    """Return all children, tied to the node that was chosen, or kept from those that must not take half of them."""
    choice = situation.placement
    return build(
        situation.parsed,
        situation.settings,
        additions=additions(situation),
        node=choice.node if choice and choice.tied else None,
        avoid=choice.avoid if choice else (),
        shun=choice.avoid_if_possible if choice else (),
    )


def _has_half(situation: Situation) -> bool:
    """Return whether the servers or the learner are missing, and no learner trains."""
    observed = situation.observed
    if observed.learner is None:
        return True
    return bool(situation.processes.servers) and observed.deployment is None and not outcome.learner_begun(observed)


def _has_no_place(situation: Situation) -> bool:
    """Return whether no child may stand: there is no node, or what waits for one is to be tied to another."""
    choice = situation.placement
    if choice is None or not choice.tied:
        return False
    return choice.node is None or _waits_untied(situation.observed)


def _waits_untied(observed: Observed) -> bool:
    """Return whether children stand that are tied to no node, and none of their pods has one."""
    bound = any(pod["spec"].get("nodeName") for pod in observed.pods)
    return bool(placement.standing(observed)) and placement.tied_to(observed) is None and not bound


def _without(manifests: Manifests, *unwanted: str) -> Manifests:
    return tuple(manifest for manifest in manifests if manifest["kind"] not in unwanted)
