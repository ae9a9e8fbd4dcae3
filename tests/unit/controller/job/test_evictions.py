"""Evictions by the kubelet: each counts, is told in its own words, costs a pause, and after a bound the job fails."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_api.job_status import JobStatus
from stage2_api.parsing import parse_job
from stage2_controller.job import names
from stage2_controller.plan.result import Plan
from stage2_controller.report import explanation
from stage2_controller.report.explanation import events
from stage2_controller.state import conditions, reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller.job.test_jobset import job as jobset_job
from tests.unit.controller.job.test_replaced_pods import another, leaving

MEMORY = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 84Mi. "
FOLDER = 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". '
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": MEMORY}
ROLES = (names.ROLE_ROLLOUT, names.ROLE_LEARNER)


def evicted(pod: b.Object, message: str = MEMORY, *, number: int = 0) -> b.Object:
    """The pod once the kubelet has evicted it; its containers got SIGKILL."""
    killed = [{**one, "ready": False, "state": b.ended(137)} for one in pod["status"]["containerStatuses"]]
    status = {"phase": "Failed", "reason": "Evicted", "message": message, "conditions": [DISRUPTED]}
    one = another(pod, number) if number else pod
    return {**one, "status": {**pod["status"], **status, "containerStatuses": killed}}


def of_role(role: str) -> b.Object:
    return b.rollout_pod(True, True, True) if role == names.ROLE_ROLLOUT else b.learner_pod()


def without(role: str, raw: b.Object, *more: b.Object) -> Observed:
    """What is observed of a running job whose pod of a role is gone, beside these pods."""
    others = [of_role(one) for one in ROLES if one != role]
    return b.started(raw, pods=(*others, *more), progress=None)


def trained(raw: b.Object) -> b.Object:
    return b.with_status(raw, b.planned(raw, b.started(raw)))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("message", [MEMORY, FOLDER])
def test_eviction_is_counted_and_reported_in_kubelets_words(role: str, message: str) -> None:
    raw = trained(b.job())
    gone = evicted(of_role(role), message)
    made = b.planned(raw, without(role, raw, gone))
    assert made.status["evictions"] == 1
    (event,) = [one for one in events(raw["status"], made.status) if one.reason == "Evicted"]
    assert event.type == "Warning"
    assert message.strip() in event.message
    assert b.NODE in event.message
    assert gone["metadata"]["name"] in event.message
    assert b.condition(made, reasons.PLACED) == ("False", reasons.EVICTED)
    assert "exit code" not in str(made.status["conditions"])
    assert "retries" not in str(made.status["conditions"])
    assert b.condition(made, reasons.READY) == ("False", reasons.EVICTED)
    JobStatus.model_validate(made.status)


@pytest.mark.parametrize("role", ROLES)
def test_eviction_is_counted_once_even_if_replacement_pod_exists(role: str) -> None:
    raw = trained(b.job())
    seen = without(role, raw, evicted(of_role(role)), another(b.pod(role, node=None)))
    made = b.planned(raw, seen)
    assert made.status["evictions"] == 1
    again = b.planned(b.with_status(raw, made), seen, after_s=5)
    assert again.status["evictions"] == 1, "each counts once"


def test_eviction_of_both_pods_counts_twice() -> None:
    raw = trained(b.job())
    made = b.planned(raw, b.started(raw, pods=tuple(evicted(of_role(role)) for role in ROLES), progress=None))
    assert made.status["evictions"] == 2


@pytest.mark.parametrize("after_s", [0, 29])
def test_evicted_job_deletes_all_pods_and_pauses(after_s: float) -> None:
    raw = trained(b.job())
    seen = without(names.ROLE_LEARNER, raw, evicted(b.learner_pod()))
    made = b.planned(raw, seen)
    assert made.deletions == ("Job", "Deployment")
    assert not {"Job", "Deployment"} & set(b.kinds(made))
    paused = b.planned(b.with_status(raw, made), Observed(secret=b.secret()), after_s=after_s)
    assert not {"Job", "Deployment"} & set(b.kinds(paused))
    assert b.condition(paused, reasons.PLACED) == ("False", reasons.EVICTED)
    assert paused.again_after_s == 30 - after_s


def test_evicted_job_starts_again_after_pause() -> None:
    raw = trained(b.job())
    raw = b.with_status(raw, b.planned(raw, without(names.ROLE_LEARNER, raw, evicted(b.learner_pod()))))
    made = b.planned(raw, Observed(secret=b.secret()), after_s=30)
    assert {"Job", "Deployment"} <= set(b.kinds(made))
    assert made.status["evictions"] == 1


def evictions_in_a_row(raw: b.Object, times: int) -> tuple[b.Object, list[float]]:
    """The job after so many evictions of its learner, each as soon as it trains again, and the pauses between them."""
    now_s, pauses = 0.0, []
    for number in range(1, times + 1):
        raw = b.with_status(raw, b.planned(raw, b.started(raw), after_s=now_s))
        seen = without(names.ROLE_LEARNER, raw, evicted(b.learner_pod(), number=number))
        made = b.planned(raw, seen, after_s=now_s)
        raw = b.with_status(raw, made)
        if raw["status"]["phase"] == reasons.FAILED:
            return raw, pauses
        pause_s = b.planned(raw, Observed(secret=b.secret()), after_s=now_s).again_after_s
        assert pause_s is not None
        pauses.append(pause_s)
        now_s += pause_s
        raw = b.with_status(raw, b.planned(raw, Observed(secret=b.secret()), after_s=now_s))
    return raw, pauses


def test_eviction_pauses_double_up_to_limit() -> None:
    raw, pauses = evictions_in_a_row(b.job(evictionLimit=50), 7)
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    assert raw["status"]["evictions"] == 7


@pytest.mark.parametrize("limit", [0, 3, None])
def test_job_fails_once_evictions_exceed_limit(limit: int | None) -> None:
    """Fifty evictions were neither counted nor bounded."""
    raw = b.job(**({} if limit is None else {"evictionLimit": limit}))
    most = parse_job(raw).spec.eviction_limit
    assert most == (10 if limit is None else limit)
    raw, pauses = evictions_in_a_row(raw, 50)
    assert (raw["status"]["phase"], raw["status"]["evictions"], len(pauses)) == (reasons.FAILED, most + 1, most)
    failed = conditions.find(raw["status"], reasons.FAILED)
    assert failed is not None
    assert failed["reason"] == reasons.EVICTED_TOO_OFTEN
    times = f"{most + 1} times" if most else "once"
    assert f"evicted {times}, and spec.evictionLimit allows {most}" in failed["message"]
    assert MEMORY.strip() in failed["message"]


def test_job_evicted_too_often_runs_again_after_limit_is_raised() -> None:
    raw, _ = evictions_in_a_row(b.job(evictionLimit=0), 1)
    left = Observed(pods=(evicted(b.learner_pod(), number=1),), secret=b.secret())
    same = b.planned(b.edited(raw, evictionLimit=0), left, after_s=60)
    assert same.status["phase"] == reasons.FAILED
    made = b.planned(b.edited(raw, evictionLimit=2), left, after_s=60)
    assert made.status["phase"] != reasons.FAILED
    assert made.status.get("evictions", 0) == 0, "those of before do not count again"


def test_suspending_job_resets_eviction_count_and_pause() -> None:
    raw, _ = evictions_in_a_row(b.job(), 2)
    left = Observed(pods=(evicted(b.learner_pod(), number=2),), secret=b.secret())
    suspended = b.with_status(raw, b.planned(b.edited(raw, suspend=True), left))
    assert suspended["status"]["evictions"] == 0
    resumed = b.planned(b.edited(suspended, suspend=False), left)
    assert resumed.status.get("evictions", 0) == 0
    assert "Deployment" in b.kinds(resumed), "and tries at once"


def drained(role: str) -> b.Object:
    moved = {**DISRUPTED, "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}
    pod = leaving(of_role(role))
    return {**pod, "status": {**pod["status"], "conditions": [moved]}}


def shut_down(role: str) -> b.Object:
    text = {"reason": "Terminated", "message": "Pod was terminated in response to imminent node shutdown."}
    gone = evicted(of_role(role))
    return {**gone, "status": {**gone["status"], **text}}


def rejected(role: str) -> b.Object:
    """A pod that the kubelet did not even start, because its node is under pressure: another one follows at once."""
    pod = b.pod(role)
    text = "The node had condition: [DiskPressure]. "
    return {**pod, "status": {"phase": "Failed", "reason": "Evicted", "message": text}}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", [drained, shut_down, rejected])
def test_drain_shutdown_or_admission_rejection_does_not_count_as_eviction(role: str, how: Any) -> None:
    raw = trained(b.job(evictionLimit=0))
    made = b.planned(raw, without(role, raw, how(role)))
    assert made.status.get("evictions", 0) == 0
    assert b.condition(made, reasons.FAILED) is None
    assert "exit code" not in str(made.status["conditions"])


def observed_jobset(raw: b.Object) -> Observed:
    """What is observed of a JobSet whose servers answer and whose learner trains."""
    made = b.planned(raw)
    rollout = b.pod(names.ROLE_ROLLOUT, b.up("server-0"), b.up("server-1"))
    of_index = [another(rollout, number) for number in (0, 1)]
    for number, pod in enumerate(of_index):
        pod["metadata"] |= {"labels": {**pod["metadata"]["labels"], names.LABEL_POD_INDEX: str(number)}}
    pods = (*of_index, b.learner_pod())
    return Observed(jobset=b.child(made, names.JOBSET), secret=b.child(made, "Secret"), pods=pods)


@pytest.mark.parametrize("role", ROLES)
def test_eviction_of_jobset_pod_is_counted_while_other_pods_keep_running(role: str) -> None:
    raw = jobset_job()
    before = observed_jobset(raw)
    raw = b.with_status(raw, b.planned(raw, before))
    pod = next(one for one in before.pods if one["metadata"]["labels"][names.LABEL_ROLE] == role)
    others = tuple(one for one in before.pods if one is not pod)
    made = b.planned(raw, replace(before, pods=(*others, evicted(pod), another(pod))))
    assert made.status["evictions"] == 1
    assert names.JOBSET not in made.deletions
    (event,) = [one for one in events(raw["status"], made.status) if one.reason == "Evicted"]
    assert MEMORY.strip() in event.message
    bounded = b.edited(b.with_status(raw, made), evictionLimit=0)
    late = b.planned(bounded, replace(before, pods=(*others, evicted(pod), another(pod))))
    assert b.condition(late, reasons.FAILED) == ("True", reasons.EVICTED_TOO_OFTEN)


def test_evictions_before_controller_upgrade_are_not_counted() -> None:
    """A Deployment leaves evicted pods behind, and an older controller counted none of them."""
    raw = trained(b.job(evictionLimit=0))
    del raw["status"]["evictions"]
    old = tuple(evicted(b.rollout_pod(True, True, True), number=number) for number in range(1, 6))
    seen = b.started(raw, pods=(*old, b.rollout_pod(True, True, True), b.learner_pod()))
    made = b.planned(raw, seen)
    assert (made.status["phase"], made.status["evictions"], made.deletions) == (reasons.RUNNING, 0, ())
    again = b.planned(b.with_status(raw, made), seen)
    assert again.status["evictions"] == 0


def test_explain_names_resources_to_raise_after_eviction() -> None:
    raw = trained(b.job())
    made = b.planned(raw, without(names.ROLE_LEARNER, raw, evicted(b.learner_pod())))
    step = explanation.first(explanation.chain(b.with_status(raw, made)))
    assert (step.name, step.state) == ("placement", "wrong")
    assert "spec.learner.resources" in step.fix
    assert MEMORY.strip() in step.message


def test_clock_that_was_ahead_does_not_lengthen_pause() -> None:
    raw = trained(b.job())
    late = b.NOW + timedelta(days=30)
    made = b.plan(raw, without(names.ROLE_LEARNER, raw, evicted(b.learner_pod())), now=late)
    again: Plan = b.planned(b.with_status(raw, made), Observed(secret=b.secret()))
    assert again.again_after_s is not None
    assert again.again_after_s <= 30


def told_to_stop(child: Any) -> b.Object:
    return {**child, "metadata": {**child["metadata"], "deletionTimestamp": conditions.timestamp(b.NOW)}}


UNUSABLE = {**b.secret(), "data": {"ca.crt": "eA=="}}
# The Secret in each of the looks: with the eviction, while the children end, while the evicted pod ends, without pods.
SECRETS: dict[str, tuple[b.Object | None, ...]] = {
    "is there": (b.secret(),) * 4,
    "is gone": (None,) * 4,
    "goes with the children": (b.secret(), None, None, None),
    "goes last": (b.secret(), b.secret(), None, None),
    "has no certificates": (UNUSABLE, UNUSABLE, UNUSABLE, None),
    "loses its certificates": (b.secret(), UNUSABLE, UNUSABLE, None),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("secrets", SECRETS)
def test_eviction_pause_holds_while_secret_is_missing_or_renewed(role: str, secrets: str) -> None:
    """The pods came back at once."""
    raw = trained(b.job())
    gone = evicted(of_role(role))
    first = without(role, raw, gone)
    ending = replace(first, learner=told_to_stop(first.learner), deployment=told_to_stop(first.deployment))
    looks = [first, ending, Observed(pods=(gone,)), Observed()]
    for at_s, (seen, secret) in enumerate(zip(looks, SECRETS[secrets], strict=True)):
        made = b.planned(raw, replace(seen, secret=secret), after_s=at_s)
        assert not {"Job", "Deployment"} & set(b.kinds(made))
        assert b.condition(made, reasons.PLACED) == ("False", reasons.EVICTED)
        assert made.status["evictions"] == 1
        assert made.again_after_s is not None
        raw = b.with_status(raw, made)
    last = b.planned(raw, Observed(), after_s=29)
    assert (last.again_after_s, "Job" in b.kinds(last)) == (1, False)
    assert {"Secret", "Job", "Deployment"} <= set(b.kinds(b.planned(b.with_status(raw, last), Observed(), after_s=30)))


@pytest.mark.parametrize("beside", ["a foreign child", "no quota", "an edit"])
def test_eviction_pause_holds_beside_other_blockers(beside: str) -> None:
    raw = trained(b.job())
    seen = without(names.ROLE_LEARNER, raw, evicted(b.learner_pod()))
    if beside == "no quota":
        raw["metadata"]["labels"] = {names.LABEL_QUEUE: "team"}
    if beside == "a foreign child":
        seen = replace(seen, foreign=("Service job-3v1-rollout",))
    after = b.edited(b.edited(raw), image="another:1") if beside == "an edit" else raw
    raw = b.with_status(after, b.planned(after, seen))
    for at_s in (1, 29):
        made = b.planned(raw, Observed(secret=b.secret(), foreign=seen.foreign), after_s=at_s)
        assert b.condition(made, reasons.PLACED) == ("False", reasons.EVICTED)
        assert made.again_after_s is not None
        assert made.again_after_s <= 30 - at_s
        raw = b.with_status(raw, made)


def test_evicted_pod_missing_from_one_list_counts_once() -> None:
    """A watch that began anew had not listed it yet."""
    raw = trained(b.job())
    gone = evicted(of_role(names.ROLE_ROLLOUT))
    for pods in ((gone,), (), (gone,), (gone,)):
        raw = b.with_status(raw, b.planned(raw, Observed(secret=b.secret(), pods=pods)))
        assert raw["status"]["evictions"] == 1


def test_eviction_before_refused_edit_does_not_count_after_it() -> None:
    raw = trained(b.job())
    gone = evicted(of_role(names.ROLE_ROLLOUT))
    raw = b.with_status(raw, b.planned(raw, without(names.ROLE_ROLLOUT, raw, gone)))
    left = b.pods_alone(gone)
    refused = b.edited(raw, learner={"gpus": 2})
    refused = b.with_status(refused, b.planned(refused, left))
    assert b.condition(Plan(refused["status"]), reasons.FAILED) == ("True", reasons.INVALID_SPEC)
    made = b.planned(b.edited(refused, learner=raw["spec"]["learner"]), left)
    assert (made.status.get("evictions", 0), b.condition(made, reasons.PLACED)) == (0, None)


def test_eviction_after_job_failed_does_not_count_when_it_runs_again() -> None:
    raw = trained(b.job(activeDeadlineSeconds=60))
    raw = b.with_status(raw, b.planned(raw, b.started(raw), after_s=60))
    left = b.pods_alone(evicted(b.learner_pod()))
    raw = b.with_status(raw, b.planned(raw, left, after_s=61))
    made = b.planned(b.edited(raw, activeDeadlineSeconds=None), left, after_s=62)
    assert (made.status["evictions"], b.condition(made, reasons.PLACED)) == (0, None)


@pytest.mark.parametrize(("evicted_s", "count"), [(-1, 2), (0, 2), (11, 1)])
def test_eviction_of_pod_already_told_to_stop_does_not_count(evicted_s: float, count: int) -> None:
    """The node still lacked memory while the job gave it up: one eviction cost two."""
    raw = trained(b.job())
    first = evicted(of_role(names.ROLE_ROLLOUT))
    raw = b.with_status(raw, b.planned(raw, without(names.ROLE_ROLLOUT, raw, first)))
    second = leaving(evicted(b.learner_pod()))
    second["metadata"] |= {"deletionTimestamp": conditions.timestamp(b.NOW + timedelta(seconds=30))}
    at = conditions.timestamp(b.NOW + timedelta(seconds=evicted_s))
    second["status"] |= {"conditions": [{**DISRUPTED, "lastTransitionTime": at}]}
    made = b.planned(raw, b.pods_alone(first, second), after_s=12)
    assert made.status["evictions"] == count


def test_evicted_jobset_learner_is_not_also_counted_as_restart() -> None:
    raw = jobset_job()
    seen = observed_jobset(raw)
    raw = b.with_status(raw, b.planned(raw, seen))
    learner = seen.pods[-1]
    made = b.planned(raw, replace(seen, pods=(*seen.pods[:-1], evicted(learner), another(learner))))
    assert (made.status["evictions"], made.status["restarts"]) == (1, 0)


@pytest.mark.parametrize("how", [evicted, lambda pod: shut_down(names.ROLE_ROLLOUT) | {"metadata": pod["metadata"]}])
def test_evicted_or_shut_down_jobset_server_pod_is_reported_in_kubelets_words(how: Any) -> None:
    """Its servers had crashed with exit code 137."""
    raw = jobset_job()
    seen = observed_jobset(raw)
    raw = b.with_status(raw, b.planned(raw, seen))
    first, *others = seen.pods
    gone = how(first)
    made = b.planned(raw, replace(seen, pods=(gone, *others)))
    expected = reasons.EVICTED if how is evicted else reasons.PODS_ENDING
    assert b.condition(made, reasons.ROLLOUT_READY) == ("False", expected)
    message = b.message(made, reasons.ROLLOUT_READY)
    assert gone["status"]["message"].strip() in message
    assert "exit code" not in message
    assert made.status["rollout"] == "2/4"
