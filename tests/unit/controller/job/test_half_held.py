"""Half of a job holds its node for a pod that comes, and not for ever for one that preempts, or hangs as it goes."""

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.conditions import timestamp
from stage2_controller.observed import Observed
from stage2_controller.place import binding
from stage2_controller.place.binding import NOMINATED_S, OVERDUE_S
from stage2_controller.place.half_placed import HALF_PLACED_S, NOT_JUDGED_S, NOT_MADE_S
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_old_learner import ending
from tests.unit.controller.job.test_placement import half, placed, planned, refused_pod

MODES = pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])


def nominated(pod: Any) -> Any:
    made = copy.deepcopy(pod)
    made["status"]["nominatedNodeName"] = b.NODE
    return made


def waits(mode: str) -> tuple[Any, Any, Observed]:
    """A job, the account of its node, and what is observed while its servers have that and its learner does not."""
    raw, account = b.job(placement={"mode": mode}), n.capacity(n.node())
    made = planned(raw, account)
    return raw, account, half(Observed(deployment=b.child(made, "Deployment"), learner=b.learner_job(made)))


@MODES
def test_a_pod_that_preempts_others_has_five_minutes_for_it(mode: str) -> None:
    raw, account, observed = waits(mode)
    servers, learner = observed.pods
    observed = replace(observed, pods=(servers, nominated(learner)))
    early = planned(raw, account, observed, after_s=NOMINATED_S - 1)
    assert (early.deletions, early.again_after_s) == ((), 1)
    assert b.condition(early, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    noted = planned(raw, account, observed, after_s=NOMINATED_S)
    assert (noted.deletions, b.condition(noted, reasons.PLACED)) == ((), ("Unknown", reasons.HALF_PLACED))
    undone = planned(b.told(raw, noted), account, observed, after_s=NOMINATED_S + HALF_PLACED_S)
    assert undone.deletions == ("Job", "Deployment")


def test_a_pod_that_came_late_preempts_from_then_on() -> None:
    raw, account, observed = waits("Scheduler")
    servers, learner = observed.pods
    late = nominated(learner)
    late["status"]["conditions"][0]["lastTransitionTime"] = timestamp(b.NOW + timedelta(seconds=900))
    made = planned(raw, account, replace(observed, pods=(servers, late)), after_s=901)
    assert b.condition(made, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    assert made.again_after_s == NOMINATED_S - 1


def test_a_job_none_of_whose_pods_gets_the_room_that_it_preempts_moves() -> None:
    raw, account = b.job(), n.capacity(n.node())
    pods = tuple(nominated(refused_pod(role)) for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER))
    observed = replace(placed(raw, account), pods=pods, progress=None)
    early = planned(raw, account, observed, after_s=NOMINATED_S - 1)
    assert (early.deletions, early.again_after_s) == ((), 1)
    late = planned(raw, account, observed, after_s=NOMINATED_S)
    assert late.deletions == ("Job", "Deployment")
    assert b.condition(late, reasons.PLACED) == ("False", reasons.NODE_FULL)


@MODES
@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_and_that_somebody_keeps_does_not_hold_the_other_half(mode: str, phase: str) -> None:
    """A finalizer of others keeps it."""
    raw, account, observed = waits(mode)
    kept = ending(b.pod(names.ROLE_LEARNER, name="kept", phase=phase))
    observed = replace(observed, pods=(*observed.pods, kept))
    noted = planned(raw, account, observed, after_s=60)
    assert b.condition(noted, reasons.PLACED) == ("Unknown", reasons.HALF_PLACED)
    undone = planned(b.told(raw, noted), account, observed, after_s=60 + HALF_PLACED_S)
    assert undone.deletions == ("Job", "Deployment")


@MODES
def test_a_pod_that_does_not_end_holds_the_other_half_until_it_is_overdue(mode: str) -> None:
    raw, account, observed = waits(mode)
    servers, _ = observed.pods
    observed = replace(observed, pods=(servers, ending(b.learner_pod())))
    raw = b.told(raw, planned(raw, account, observed))
    early = planned(raw, account, observed, after_s=OVERDUE_S - 1)
    assert (early.deletions, early.again_after_s) == ((), 1)
    noted = planned(raw, account, observed, after_s=OVERDUE_S)
    assert b.condition(noted, reasons.PLACED) == ("Unknown", reasons.HALF_PLACED)
    undone = planned(b.told(raw, noted), account, observed, after_s=OVERDUE_S + HALF_PLACED_S)
    assert undone.deletions == ("Job", "Deployment")


def test_a_pod_that_is_refused_beside_one_that_is_overdue_counts_as_refused() -> None:
    raw, account = b.job(), n.capacity(n.node())
    pods = (ending(b.rollout_pod(True, True, True)), refused_pod(names.ROLE_ROLLOUT), b.learner_pod())
    observed = replace(placed(raw, account), pods=pods)
    early = planned(raw, account, observed, after_s=OVERDUE_S - 1)
    assert (early.deletions, early.again_after_s) == ((), 1)
    late = planned(raw, account, observed, after_s=OVERDUE_S)
    assert b.condition(late, reasons.PLACED) == ("False", reasons.NODE_FULL)


def test_an_old_learner_that_no_node_took_and_that_somebody_keeps_holds_up_no_new_one() -> None:
    raw, account = b.job(), n.capacity(n.node())
    kept = ending(b.pod(names.ROLE_LEARNER, node=None))
    observed = replace(placed(raw, account), learner=None, pods=(b.rollout_pod(True, True, True), kept))
    assert "Job" in b.kinds(planned(raw, account, observed, after_s=1)), "no scheduler binds a pod that is deleted"


HOUR_S = 3600
WHOLE = (("True", reasons.NODE_CHOSEN), None)  # None: the scheduler has found the node


def trained_for_an_hour(mode: str) -> tuple[Any, Any, Observed]:
    """A job whose two pods have had their node since NOW, the account of that, and what is observed of it."""
    raw, account, observed = waits(mode)
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(b.NOW)}
    pods = (b.rollout_pod(True, True, True), b.learner_pod())
    observed = replace(
        observed, pods=tuple({**pod, "status": {**pod["status"], "conditions": [bound]}} for pod in pods)
    )
    return b.told(raw, planned(raw, account, observed)), account, observed


@MODES
def test_a_pod_that_is_made_anew_after_an_hour_is_waited_for_as_a_first_one(mode: str) -> None:
    """The scheduler may be away for a while: a learner that trains does not end for that."""
    raw, account, observed = trained_for_an_hour(mode)
    fresh = b.pod(names.ROLE_ROLLOUT, node=None, name="fresh")
    fresh["metadata"]["creationTimestamp"] = timestamp(b.NOW + timedelta(seconds=HOUR_S))
    observed = replace(observed, pods=(fresh, observed.pods[1]))
    early = planned(raw, account, observed, after_s=HOUR_S + NOT_JUDGED_S - 1)
    assert b.condition(early, reasons.PLACED) in WHOLE
    late = planned(raw, account, observed, after_s=HOUR_S + NOT_JUDGED_S)
    assert b.condition(late, reasons.PLACED) == ("Unknown", reasons.HALF_PLACED)


@MODES
def test_a_learners_pod_that_is_gone_after_an_hour_is_waited_for_from_then_on(mode: str) -> None:
    raw, account, observed = trained_for_an_hour(mode)
    observed = replace(observed, pods=observed.pods[:1], progress=None)
    missed = planned(raw, account, observed, after_s=HOUR_S)
    assert b.condition(missed, reasons.PLACED) in WHOLE
    raw = b.told(raw, missed)
    early = planned(raw, account, observed, after_s=HOUR_S + NOT_MADE_S - 1)
    assert b.condition(early, reasons.PLACED) in WHOLE
    late = planned(raw, account, observed, after_s=HOUR_S + NOT_MADE_S)
    assert b.condition(late, reasons.PLACED) == ("Unknown", reasons.HALF_PLACED)


def too_small(raw: Any, *, tied: bool, **node: Any) -> tuple[Any, Observed]:
    """A node that has no room beside the job's servers, and what is observed of a job whose learner is pending."""
    busy = n.capacity(n.node("busy"), n.foreign("busy", gpus=1))
    made = planned(raw, n.capacity(n.node()) if tied else busy)
    account = n.capacity(n.node(gpus=3, **node), n.bound(names.ROLE_ROLLOUT, 3))
    pods = (b.rollout_pod(True, True, True), b.pod(names.ROLE_LEARNER, node=None))
    return account, Observed(deployment=b.child(made, "Deployment"), learner=b.learner_job(made), pods=pods)


@pytest.mark.parametrize("tied", [True, False])
def test_the_scheduler_has_the_word_on_a_node_to_which_the_job_was_tied(tied: bool) -> None:
    account, observed = too_small(b.job(), tied=tied)
    made = planned(b.job(), account, observed)
    assert made.deletions == (() if tied else ("Job", "Deployment"))


def test_servers_do_not_leave_a_silent_node_because_it_is_too_small() -> None:
    """A learner's pod there may have been bound and may write, though nobody could tell."""
    account, observed = too_small(b.job(), tied=False, not_ready=True)
    made = planned(b.job(), account, observed)
    assert (made.deletions, b.condition(made, reasons.PLACED)) == ((), ("Unknown", reasons.NODE_NOT_READY))


def evicted(pod: Any, container: str, *, at_s: float) -> Any:
    """A pod as the kubelet leaves it; its Job or ReplicaSet keeps it."""
    ended = [{"type": "Ready", "status": "False", "lastTransitionTime": timestamp(b.NOW + timedelta(seconds=at_s))}]
    status = {
        "phase": "Failed",
        "reason": "Evicted",
        "conditions": ended,
        "containerStatuses": [b.down(container, 137)],
    }
    return {**pod, "status": {**pod["status"], **status}}


@MODES
def test_a_learners_pod_that_has_ended_and_whose_successor_is_refused_holds_no_node(mode: str) -> None:
    """Its share of a quota went to another pod as it was evicted; the servers held their GPUs for ever."""
    raw, account, observed = trained_for_an_hour(mode)
    servers, learner = observed.pods
    failed = replace(observed, pods=(servers, evicted(learner, "learner", at_s=HOUR_S)), progress=None)
    since = binding.learner_unmade_since(failed, raw["status"])
    assert since == b.NOW + timedelta(seconds=HOUR_S), "from when it ended events may say why"
    waits_for_its_job = planned(raw, account, failed, after_s=HOUR_S + 600)
    assert b.condition(waits_for_its_job, reasons.PLACED) in WHOLE, "a Job makes the next one after a pause"
    metadata = {**(failed.learner or {})["metadata"], "creationTimestamp": timestamp(b.NOW)}
    learner_job = {**(failed.learner or {}), "metadata": metadata}
    refused = replace(failed, learner=learner_job, learner_refused="exceeded quota: gpus")
    noted = planned(b.told(raw, waits_for_its_job), account, refused, after_s=HOUR_S + 660)
    assert b.condition(noted, reasons.PLACED) == ("Unknown", reasons.HALF_PLACED)
    assert b.condition(noted, reasons.LEARNER_RUNNING) == ("False", reasons.POD_REFUSED)
    assert "exceeded quota: gpus" in noted.status["message"]
    undone = planned(b.told(raw, noted), account, refused, after_s=HOUR_S + 660 + HALF_PLACED_S)
    assert undone.deletions == ("Job", "Deployment")


@MODES
def test_servers_that_have_ended_and_are_not_made_anew_are_told_as_refused(mode: str) -> None:
    raw, account, observed = trained_for_an_hour(mode)
    servers, learner = observed.pods
    at = {"lastTransitionTime": timestamp(b.NOW + timedelta(seconds=HOUR_S))}
    refusal = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus", **at}
    deployment = {**(observed.deployment or {}), "status": {"conditions": [refusal]}}
    pods = (evicted(servers, "server-0", at_s=HOUR_S), learner)
    made = planned(raw, account, replace(observed, pods=pods, deployment=deployment), after_s=HOUR_S + 60)
    assert b.condition(made, reasons.ROLLOUT_READY) == ("False", reasons.POD_REFUSED)
    assert "exceeded quota: gpus" in b.message(made, reasons.PLACED)
