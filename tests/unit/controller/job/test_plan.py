"""The stages of a job: which children may exist when, and which must not."""

from dataclasses import replace
from datetime import timedelta

import pytest

from stage2_api.parsing import parse_job
from stage2_controller.job import names
from stage2_controller.plan import outcome
from stage2_controller.plan.result import Plan
from stage2_controller.state import conditions, ending, reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b

AHEAD_S = 3600.0
"""How wrong the clock was."""


def test_active_deadline_restarts_when_clock_is_set_back() -> None:
    raw = b.job(activeDeadlineSeconds=60)
    raw = b.with_status(raw, b.planned(raw, after_s=AHEAD_S))
    observed = b.started(raw)
    back = b.planned(raw, observed)
    assert back.again_after_s is not None
    assert back.again_after_s <= 60
    made = b.planned(b.with_status(raw, back), observed, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.DEADLINE_EXCEEDED)


def test_start_deadline_restarts_when_clock_is_set_back() -> None:
    raw = b.job(learner={"startDeadlineSeconds": 40})
    loading = b.started(raw, pods=(b.rollout_pod(True, False, True), b.waiting_learner_pod()), progress=None)
    raw = b.with_status(raw, b.planned(raw, loading, after_s=AHEAD_S))
    back = b.planned(raw, loading)
    assert back.again_after_s == 40
    made = b.planned(b.with_status(raw, back), loading, after_s=40)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)


def test_clock_briefly_behind_does_not_shorten_deadline() -> None:
    """The cluster dated the job's pods after its start, so it is our clock that is wrong."""
    raw = b.job(activeDeadlineSeconds=60)
    raw = b.with_status(raw, b.planned(raw))
    observed = b.started(raw)
    behind = b.planned(raw, observed, after_s=-AHEAD_S)
    assert behind.status["startTime"] == conditions.timestamp(b.NOW)
    made = b.planned(b.with_status(raw, behind), observed, after_s=59)
    assert made.status["phase"] == reasons.RUNNING


def test_ttl_restarts_when_clock_is_set_back() -> None:
    raw = b.job(ttlSecondsAfterFinished=100)
    complete = b.completed(raw)
    raw = b.with_status(raw, b.planned(raw, complete, after_s=AHEAD_S))
    back = b.planned(raw, complete)
    assert (back.delete_job, back.again_after_s) == (False, 100)
    assert b.planned(b.with_status(raw, back), complete, after_s=100).delete_job


def test_pod_is_overdue_only_after_its_grace_period() -> None:
    """The time of its deletion lies in the future for as long as its grace is: no clock is wrong."""
    pod = b.pod(names.ROLE_LEARNER)
    ends = conditions.timestamp(b.NOW + timedelta(seconds=900))
    pod["metadata"] |= {"deletionTimestamp": ends, "deletionGracePeriodSeconds": 900}
    assert ending.seconds_to_overdue(pod, b.NOW) == 900 + ending.OVERDUE_S
    wrong = b.NOW - timedelta(seconds=AHEAD_S)
    assert ending.seconds_to_overdue(pod, wrong) == 900 + ending.OVERDUE_S


def test_learner_pod_waits_for_servers_to_load() -> None:
    raw = b.job()
    loading = b.started(raw, pods=(b.rollout_pod(True, False, True), b.waiting_learner_pod()), progress=None)
    made = b.planned(raw, loading)
    assert made.status["phase"] == reasons.STARTING
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.WAITING_FOR_SERVERS)
    assert made.deletions == ()


def test_server_restart_does_not_delete_learner() -> None:
    raw = b.job()
    made = b.planned(raw, b.started(raw, pods=(b.rollout_pod(True, False, True), b.learner_pod())))
    assert "Job" in b.kinds(made)
    assert made.deletions == ()


def test_colocated_job_has_no_servers() -> None:
    made = b.planned(b.job(config=b.COLOCATE, rollout={}, learner={"gpus": 4}))
    assert b.kinds(made) == ["Secret", "ConfigMap", "NetworkPolicy", "Job"]
    learner = b.child(made, "Job")["spec"]["template"]["spec"]
    assert "affinity" not in learner
    assert "--processes=4" in learner["containers"][0]["command"]
    assert "initContainers" not in learner
    assert learner["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "4"}}


def test_repeated_pass_over_same_state_yields_same_plan() -> None:
    raw = b.job()
    observed = b.started(raw)
    made = b.planned(raw, observed)
    again = b.planned(b.with_status(raw, made), observed, after_s=60)
    assert (again.status, again.children) == (made.status, made.children)


def test_finished_learner_deletes_servers() -> None:
    raw = b.job()
    made = b.planned(raw, b.completed(raw))
    assert made.status["phase"] == reasons.SUCCEEDED
    assert made.deletions == ("Deployment",)
    assert made.children == ()


def test_finished_job_stays_finished_when_children_are_gone() -> None:
    raw = b.job()
    done = b.with_status(raw, b.planned(raw, b.completed(raw)))
    later = b.planned(done, Observed(), after_s=3600)
    assert later.children == ()
    assert later.status == done["status"]


def test_suspended_job_deletes_pods_and_keeps_other_children() -> None:
    raw = b.job()
    observed = b.started(raw)
    made = b.planned(b.job(suspend=True), observed)
    assert made.deletions == ("Job", "Deployment")
    assert b.kinds(made) == ["ConfigMap", "NetworkPolicy", "Service"]
    assert made.status["phase"] == reasons.SUSPENDED


def test_resumed_job_recreates_same_learner_and_keeps_furthest_step() -> None:
    first = b.started(b.job())
    running = b.with_status(b.job(), b.planned(b.job(), first))
    suspended = b.with_status({**b.job(suspend=True), "status": running["status"]}, b.planned(running, first))
    stopped = b.planned({**b.job(suspend=True), "status": suspended["status"]}, first)
    resumed = {**b.job(), "status": stopped.status}
    left = b.started(b.job(), learner=None, progress=None, pods=(b.rollout_pod(True, True, True),))
    made = b.planned(resumed, left)
    assert b.child(made, "Job") == {key: value for key, value in (first.learner or {}).items() if key != "status"}
    assert first.configmap == b.child(b.planned(resumed, replace(left, configmap=None)), "ConfigMap")
    assert made.status["furthestStep"] == 4
    assert "step" not in made.status, "the next learner has not done any yet"


def test_job_past_active_deadline_fails_and_deletes_its_pods() -> None:
    raw = b.with_status(b.job(activeDeadlineSeconds=60), b.planned(b.job(activeDeadlineSeconds=60)))
    observed = b.started(raw)
    assert b.planned(raw, observed, after_s=59).again_after_s == 1
    made = b.planned(raw, observed, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.DEADLINE_EXCEEDED)
    assert made.deletions == ("Deployment", "Job")


def test_servers_not_all_ready_by_start_deadline_fail_job() -> None:
    raw = b.job(learner={"startDeadlineSeconds": 60})
    loading = b.started(raw, pods=(b.rollout_pod(True, False, True), b.waiting_learner_pod()), progress=None)
    raw = b.with_status(raw, b.planned(raw, loading))
    assert b.planned(raw, loading, after_s=59).again_after_s == 1
    made = b.planned(raw, loading, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)
    assert "2 of 3 servers answer; server-1 still loading" in b.message(made, reasons.FAILED)
    assert made.deletions == ("Deployment", "Job")


def test_start_deadline_is_capped_by_admin_policy() -> None:
    settings = replace(b.SETTINGS, policy=replace(b.SETTINGS.policy, longest_start_seconds=60))

    def planned(raw: b.Object, *, after_s: float = 0) -> Plan:
        now = b.NOW + timedelta(seconds=after_s)
        return b.plan(raw, loading, settings=settings, now=now)

    raw = b.job(learner={"startDeadlineSeconds": 7200})
    loading = b.started(raw, pods=(b.rollout_pod(True, False, True), b.waiting_learner_pod()), progress=None)
    raw = b.with_status(raw, planned(raw))
    assert planned(raw, after_s=59).again_after_s == 1
    assert b.condition(planned(raw, after_s=60), reasons.FAILED) == ("True", reasons.START_DEADLINE)


def test_start_deadline_no_longer_applies_once_learner_runs() -> None:
    raw = b.job(learner={"startDeadlineSeconds": 60})
    raw = b.with_status(raw, b.planned(raw, b.started(raw)))
    restarted = b.started(raw, pods=(b.rollout_pod(True, False, True), b.learner_pod()))
    assert b.condition(b.planned(raw, restarted, after_s=3600), reasons.FAILED) is None


def test_start_deadline_restarts_when_all_pods_vanish() -> None:
    """As where its node is removed: the pods of a job that ran for long are gone at once."""
    raw = b.job(learner={"startDeadlineSeconds": 60})
    raw = b.with_status(raw, b.planned(raw, b.started(raw)))
    gone = b.started(raw, pods=(), progress=None)
    made = b.planned(raw, gone, after_s=3600)
    assert b.condition(made, reasons.FAILED) is None
    assert b.condition(b.planned(b.with_status(raw, made), gone, after_s=3659), reasons.FAILED) is None
    late = b.planned(b.with_status(raw, made), gone, after_s=3660)
    assert b.condition(late, reasons.FAILED) == ("True", reasons.START_DEADLINE)


AT = {"lastTransitionTime": conditions.timestamp(b.NOW)}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU", **AT}


@pytest.mark.parametrize(
    ("pods", "status"),
    [((b.pod("rollout", node=None, conditions=[UNSCHEDULABLE]),), {}), ((), b.refused_by_quota())],
    ids=["by the scheduler", "by the API server"],
)
def test_refused_server_pods_do_not_consume_start_deadline(pods: tuple[b.Object, ...], status: b.Object) -> None:
    raw = b.job(learner={"startDeadlineSeconds": 60}, placement={"mode": "Scheduler"})
    refused = b.started(raw, pods=pods, progress=None)
    deployment = {**(refused.deployment or {}), "status": status}
    refused = replace(refused, deployment=deployment)
    raw = b.with_status(raw, b.planned(raw, refused))
    assert b.condition(b.planned(raw, refused, after_s=86400), reasons.FAILED) is None


def test_start_deadline_counts_from_when_scheduler_found_node() -> None:
    raw = b.job(learner={"startDeadlineSeconds": 60}, placement={"mode": "Scheduler"})
    waiting = b.started(raw, pods=(b.pod("rollout", node=None),), progress=None)
    raw = b.with_status(raw, b.planned(raw, waiting))
    at = conditions.timestamp(b.NOW + timedelta(seconds=600))
    loading = b.rollout_pod(False, False, False)
    loading["status"]["conditions"] = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at}]
    there = b.started(raw, pods=(loading, b.waiting_learner_pod()), progress=None)
    assert b.condition(b.planned(raw, there, after_s=659), reasons.FAILED) is None
    assert b.condition(b.planned(raw, there, after_s=660), reasons.FAILED) == ("True", reasons.START_DEADLINE)


@pytest.mark.parametrize("waits_for", [reasons.PLACED, reasons.QUOTA_RESERVED])
def test_start_deadline_does_not_run_while_job_waits_for_node_or_quota(waits_for: str) -> None:
    raw = b.job(learner={"startDeadlineSeconds": 60})
    loading = b.started(raw, pods=(b.rollout_pod(False, False, False), b.waiting_learner_pod()), progress=None)
    raw = b.with_status(raw, b.planned(raw, loading))
    waits = {"type": waits_for, "status": "False", "lastTransitionTime": raw["status"]["startTime"]}
    status = {**raw["status"], "conditions": [waits]}
    assert outcome.seconds_to_start(parse_job(raw), loading, status, b.NOW) is None


def test_finished_job_is_deleted_after_its_ttl() -> None:
    raw = b.job(ttlSecondsAfterFinished=100)
    complete = b.completed(raw)
    done = b.with_status(raw, b.planned(raw, complete))
    early = b.planned(done, complete, after_s=40)
    assert (early.delete_job, early.again_after_s) == (False, 60)
    assert b.planned(done, complete, after_s=100).delete_job


@pytest.mark.parametrize("missing", ["configmap", "service", "deployment"])
def test_deleted_child_is_recreated(missing: str) -> None:
    raw = b.job()
    kind = {"configmap": "ConfigMap", "service": "Service", "deployment": "Deployment"}[missing]
    assert kind in b.kinds(b.planned(raw, b.started(raw, **{missing: None})))


def test_running_job_is_reconciled_again_for_its_progress() -> None:
    raw = b.job()
    assert b.planned(raw, b.started(raw)).again_after_s == b.SETTINGS.progress_s
    assert b.planned(raw).again_after_s is None


def failed() -> tuple[b.Object, Observed]:
    """A job that failed, as it is reported, with the learner Job that failed."""
    raw = b.job()
    observed = b.started(raw)
    ended = replace(observed, learner=b.learner_job(b.planned(raw, observed), b.job_condition("Failed")), pods=())
    reported = b.with_status(raw, b.planned(raw, ended))
    assert (reported["status"]["phase"], reported["status"]["specHash"] != "") == (reasons.FAILED, True)
    return reported, replace(ended, deployment=None)


def test_corrected_failed_job_runs_again_after_old_learner_is_gone() -> None:
    raw, ended = failed()
    corrected = b.edited(raw, learner={"gpus": 1, "backoffLimit": 9})
    made = b.planned(corrected, ended, after_s=60)
    assert made.deletions == ("Job",)
    assert (made.status["phase"], b.condition(made, "Failed")) == (reasons.PENDING, None)
    going = {**ended.learner, "metadata": {**ended.learner["metadata"], "deletionTimestamp": "2026-01-02T03:05:05Z"}}
    again = b.planned(b.with_status(corrected, made), replace(ended, learner=going), after_s=61)
    assert again.status["phase"] == reasons.PENDING, "the failure of the job before is none of this one's"
    fresh = b.planned(b.with_status(corrected, made), Observed(), after_s=62)
    assert "Deployment" in b.kinds(fresh)
    assert fresh.status["startTime"] == "2026-01-02T03:05:05Z", "its deadlines count from the correction"


@pytest.mark.parametrize("change", [{}, {"ttlSecondsAfterFinished": 5}, {"activeDeadlineSeconds": 30}])
def test_failed_job_stays_failed_if_edit_does_not_change_pods(change: b.Object) -> None:
    raw, ended = failed()
    made = b.planned(b.edited(raw, **change), ended, after_s=60)
    assert (made.status["phase"], made.children) == (reasons.FAILED, ())


def made_from(made: Plan, pod: b.Object) -> b.Object:
    """The pod as the plan's Deployment makes it."""
    annotations = b.child(made, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    return {**pod, "metadata": {**pod["metadata"], "annotations": annotations}}


def test_corrected_job_ignores_failed_servers_of_old_spec() -> None:
    """Deployment and Job are gone at once; the garbage collector comes to their pods a moment later."""
    raw, refused = b.job(), b.pod(names.ROLE_ROLLOUT, b.down("server-0", 64, "no such model"))
    old = made_from(b.planned(raw), refused)
    raw = b.with_status(raw, b.planned(raw, b.started(raw, pods=(old,), progress=None)))
    assert b.condition(b.planned(raw), reasons.FAILED) == ("True", reasons.CONFIGURATION_ERROR)
    corrected = b.edited(raw, image="corrected:1")
    made = b.planned(corrected, b.pods_alone(old), after_s=60)
    assert (made.status["phase"], "Deployment" in b.kinds(made)) == (reasons.STARTING, True)
    new = made_from(made, {**refused, "metadata": {**refused["metadata"], "name": "new"}})
    again = b.planned(b.with_status(corrected, made), b.started(corrected, pods=(new,), progress=None), after_s=61)
    assert b.condition(again, reasons.FAILED) == ("True", reasons.CONFIGURATION_ERROR)


def test_unmarked_servers_of_older_controller_can_still_fail_job() -> None:
    raw, refused = b.job(), b.pod(names.ROLE_ROLLOUT, b.down("server-0", 64, "no such model"))
    made = b.planned(raw, b.started(raw, pods=(refused,), progress=None))
    assert b.condition(made, reasons.FAILED) == ("True", reasons.CONFIGURATION_ERROR)


def test_controller_upgrade_does_not_restart_failed_job() -> None:
    raw, ended = failed()
    raw["status"]["specHash"] = "of-an-older-version"
    assert b.planned(raw, ended, after_s=60).status["phase"] == reasons.FAILED


def test_corrected_job_requests_new_kueue_workload() -> None:
    raw, ended = failed()
    raw["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    finished = {"type": "Finished", "status": "True", "reason": "JobFinished", "message": ""}
    workload = {"metadata": {"name": "job-3v1-quota", "uid": "w"}, "status": {"conditions": [finished]}}
    made = b.planned(b.edited(raw, image="corrected:1"), replace(ended, workload=workload), after_s=60)
    assert made.deletions == ("Job", "Workload")
    assert "Workload" not in b.kinds(made)
    assert made.status["phase"] == reasons.PENDING
    later = b.planned(b.with_status(b.edited(raw, image="corrected:1"), made), Observed(), after_s=61)
    assert b.kinds(later) == ["Workload"]
