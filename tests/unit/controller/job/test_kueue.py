"""A job that names a queue: one Workload, nothing else until Kueue admits it, on the host that Kueue assigns."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.children import comparison
from stage2_controller.job import names
from stage2_controller.plan.result import Plan
from stage2_controller.queue import kueue
from stage2_controller.report import explanation
from stage2_controller.state import conditions, reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.place.test_placement import planned

AT = conditions.timestamp(b.NOW)


def queued(**spec: Any) -> Any:
    raw = b.job(**spec)
    raw["metadata"]["labels"] = {kueue.QUEUE_LABEL: "team"}
    return raw


def condition(kind: str, status: str = "True", message: str = "", reason: str = "x") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": AT}


def workload(*conditions: dict[str, str], host: str | None = None, raw: Any = None) -> Any:
    made = b.child(passed(raw or queued()), "Workload")
    topology = {
        "levels": ["kubernetes.io/hostname"],
        "slices": [{"domainCount": 1, "podCounts": {"universal": 1}, "valuesPerLevel": [{"universal": host}]}],
    }
    admission = {"podSetAssignments": [{"name": "rollout", "topologyAssignment": topology}]} if host else None
    metadata = {**made["metadata"], "resourceVersion": "7"}
    return {**made, "metadata": metadata, "status": {"conditions": list(conditions), "admission": admission}}


def passed(raw: Any, observed: Observed = b.NOTHING, **more: Any) -> Plan:
    """The plan of a pass on a cluster with one free node."""
    return planned(raw, n.capacity(n.node()), observed, **more)


def reported(made: Plan) -> dict[str, tuple[str, str]]:
    """Status and reason of the conditions that Kueue is to be reported."""
    assert made.workload_patch
    conditions = made.workload_patch["status"]["conditions"]
    return {item["type"]: (item["status"], item["reason"]) for item in conditions}


def quota_step(raw: Any, made: Plan) -> explanation.Step:
    """What `explain` shows of the quota."""
    (found,) = [step for step in explanation.chain(b.with_status(raw, made)) if step.name == "quota"]
    return found


ADMITTED = (condition("QuotaReserved"), condition("Admitted"))


def test_only_workload_exists_before_admission() -> None:
    made = passed(queued())
    assert b.kinds(made) == ["Workload"]
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_PENDING)
    assert made.placement is None


def test_workload_requests_both_pods_on_same_host() -> None:
    spec = b.child(passed(queued()), "Workload")["spec"]
    assert (spec["queueName"], "active" in spec) == ("team", False)
    assert [pod_set["name"] for pod_set in spec["podSets"]] == ["rollout", "learner"]
    request = {"required": "kubernetes.io/hostname", "podSetGroupName": "job"}
    assert [pod_set["topologyRequest"] for pod_set in spec["podSets"]] == [request, request]


def test_scheduler_mode_workload_requests_no_host() -> None:
    raw = queued(placement={"mode": "Scheduler"})
    spec = b.child(passed(raw), "Workload")["spec"]
    assert [pod_set.keys() for pod_set in spec["podSets"]] == [{"name", "count", "template"}] * 2
    made = passed(raw, Observed(workload=workload(*ADMITTED, raw=raw)))
    assert {"Deployment", "Job"} <= set(b.kinds(made))
    assert "affinity" not in b.child(made, "Deployment")["spec"]["template"]["spec"]


def test_workload_requests_no_host_when_controller_placement_is_off() -> None:
    """Nothing would tie the pods to it (`controller.placement: false`), and Kueue would count another one."""
    spec = b.child(b.planned(queued()), "Workload")["spec"]
    assert [pod_set.keys() for pod_set in spec["podSets"]] == [{"name", "count", "template"}] * 2


def test_assignment_of_two_hosts_counts_as_no_host() -> None:
    found = workload(*ADMITTED, host="a")
    other = workload(*ADMITTED, host="b")["status"]["admission"]["podSetAssignments"]
    found["status"]["admission"]["podSetAssignments"] += other
    assert kueue.host(found) is None


def test_flavor_without_topology_is_reported_with_fix() -> None:
    waits = condition("QuotaReserved", "False", 'Flavor "x" does not support TopologyAwareScheduling')
    made = passed(queued(), Observed(workload=workload(waits)))
    assert made.status["message"].endswith("give the flavor a topologyName, or set spec.placement.mode to Scheduler")


def test_job_message_repeats_kueues_message() -> None:
    waits = condition("QuotaReserved", "False", "insufficient quota for nvidia.com/gpu")
    made = passed(queued(), Observed(workload=workload(waits)))
    assert made.status["message"] == "waits in queue team: insufficient quota for nvidia.com/gpu"


def test_admitted_job_runs_on_host_assigned_by_kueue() -> None:
    account = n.capacity(n.node("tight", 4), n.node("assigned", 8))
    made = planned(queued(), account, Observed(workload=workload(*ADMITTED, host="assigned")))
    assert b.kinds(made) == ["Secret", "ConfigMap", "NetworkPolicy", "Service", "Deployment", "Job", "Workload"]
    assert b.node_of(made) == "assigned"


def test_job_waits_for_assigned_host_though_another_is_free() -> None:
    account = n.capacity(n.node("b"), n.node("z"), filler := n.foreign("z", gpus=1))
    observed = Observed(workload=workload(*ADMITTED, host="z"))
    waits = planned(queued(), account, observed)
    assert b.message(waits, reasons.PLACED) == "needs 4 nvidia.com/gpu on one node; the largest free is 3 on z"
    assert waits.placement
    account.wait(n.KEY, waits.placement.need)
    account.remove("Pod", filler)
    assert account.serve() == [n.KEY]
    goes = planned(queued(), account, observed)
    assert b.node_of(goes) == "z"


@pytest.mark.parametrize(("after_s", "kept"), [(59, True), (61, False)])
@pytest.mark.parametrize("unusable", [n.node("assigned", unschedulable=True), n.node("assigned", 3)])
def test_workload_with_unusable_host_is_replaced_after_a_minute(unusable: Any, after_s: float, kept: bool) -> None:
    """Of two hosts the other one has room, which Kueue finds only for a job without quota."""
    account = n.capacity(unusable, n.node("free", 8))
    found = workload(*ADMITTED, host="assigned")
    made = planned(queued(), account, Observed(workload=found), after_s=after_s)
    assert made.placement
    assert made.placement.node is None
    assert made.deletions == (() if kept else ("Workload",))
    assert b.kinds(made) == (["Workload"] if kept else []), "a job without a place has no children, and so no Secret"
    runs = planned(queued(), n.capacity(n.node("assigned", 8)), Observed(workload=found), after_s=after_s)
    assert runs.deletions == ()


def test_assigned_host_without_matching_node_is_reported() -> None:
    observed = Observed(workload=workload(*ADMITTED, host="z"))
    made = planned(queued(), n.capacity(n.node("b")), observed)
    message = "Kueue assigned the host z, and no node has the label kubernetes.io/hostname=z"
    assert b.message(made, reasons.PLACED) == message


def test_whole_job_moves_when_kueue_assigns_another_host() -> None:
    account = n.capacity(n.node(), n.node("z"))
    made = planned(queued(), account, replace(b.started(b.job()), workload=workload(*ADMITTED, host="z")))
    assert made.deletions == ("Job", "Deployment")
    message = f"Kueue assigned the host z, which is not node {b.NODE}: the whole job moves"
    assert b.message(made, reasons.PLACED) == message
    again = planned(queued(), account, Observed(workload=workload(*ADMITTED, host="z")))
    assert b.node_of(again) == "z"


def test_compressed_host_name_from_kueue_is_expanded() -> None:
    found = workload(*ADMITTED, host="x")
    topology = found["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"]
    topology["slices"][0]["valuesPerLevel"] = [{"individual": {"prefix": "gpu-", "roots": ["7"], "suffix": "-eu"}}]
    assert kueue.host(found) == "gpu-7-eu"


def running(*conditions: dict[str, str], pods: tuple[Any, ...] | None = None) -> Observed:
    started = b.started(b.job())
    return replace(started, workload=workload(*conditions), pods=started.pods if pods is None else pods)


def test_evicted_job_deletes_pods_before_returning_quota() -> None:
    evicted = (*ADMITTED, condition("Evicted", message="preempted"))
    first = passed(queued(), running(*evicted))
    assert first.deletions == ("Job", "Deployment")
    assert first.workload_patch is None
    ready = condition("PodsReady", reason="Started")
    gone = passed(queued(), running(*evicted, ready, pods=()))
    assert reported(gone) == {
        "QuotaReserved": ("False", "Pending"),
        "Admitted": ("False", "Pending"),
        "Evicted": ("True", "x"),
        "PodsReady": ("False", "WaitForStart"),
    }
    assert gone.workload_patch
    assert gone.workload_patch["status"]["admission"] is None
    evicted_since = [item for item in gone.workload_patch["status"]["conditions"] if item["type"] == "Evicted"]
    assert evicted_since == [evicted[-1]]


def test_pods_ready_and_finished_are_reported_to_kueue_once() -> None:
    assert reported(passed(queued(), running(*ADMITTED)))["PodsReady"] == ("True", "Started")
    again = passed(queued(), running(*ADMITTED, condition("PodsReady")))
    assert again.workload_patch is None
    done = b.learner_job(b.planned(b.job(), b.started(b.job())), b.job_condition("Complete"))
    uncounted = (b.rollout_pod(True, True, True), b.learner_pod(b.down("learner", 0)))
    for end in ({"learner": done}, {"pods": uncounted}):
        ended = passed(queued(), replace(running(*ADMITTED), **end))
        assert reported(ended)["Finished"] == ("True", "JobFinished")


def test_report_to_kueue_carries_resource_version_that_was_read() -> None:
    """A merge patch replaces the list of conditions: an eviction that came in between would be lost."""
    made = passed(queued(), running(*ADMITTED))
    assert made.workload_patch
    assert made.workload_patch["metadata"] == {"resourceVersion": "7"}


@pytest.mark.parametrize(
    ("known", "learner", "answer"),
    [
        (None, None, None),  # it waits for its start, and no condition says just that
        (condition("PodsReady", "False", reason="WaitForStart"), None, None),
        (condition("PodsReady", reason="Started"), None, ("False", "WaitForRecovery")),
        (condition("PodsReady", reason="Started"), b.learner_pod(b.down("learner", 1)), ("False", "WaitForRecovery")),
        (condition("PodsReady", "False", reason="WaitForRecovery"), None, None),
        (condition("PodsReady", "False", reason="WaitForRecovery"), b.learner_pod(), ("True", "Recovered")),
        (condition("PodsReady", reason="Recovered"), b.learner_pod(), None),
        (condition("PodsReady", reason="Recovered"), None, ("False", "WaitForRecovery")),
    ],
)
def test_lost_pod_readiness_is_reported_to_kueue(known: Any, learner: Any, answer: Any) -> None:
    pods = (b.rollout_pod(True, True, True), *([learner] if learner else []))
    observed = running(*ADMITTED, *([known] if known else []), pods=pods)
    made = passed(queued(), observed)
    assert (reported(made)["PodsReady"] if answer else made.workload_patch) == answer


TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
FLAVOR = {"spec": {"nodeLabels": {"gpu": "h200"}, "tolerations": [TOLERATION]}}


def assigned(raw: Any = None, **check: Any) -> Observed:
    """Servers that answer, and a Workload whose pods were assigned to the flavor `tainted` on node-a."""
    found = workload(*ADMITTED, host=b.NODE, raw=raw)
    (rollout,) = found["status"]["admission"]["podSetAssignments"]
    rollout["flavors"] = {"cpu": "tainted", "nvidia.com/gpu": "tainted"}
    found["status"]["admission"]["podSetAssignments"] = [rollout, {**rollout, "name": "learner"}]
    if check:
        found["status"]["admissionChecks"] = [{"name": "capacity", "podSetUpdates": [{"name": "learner", **check}]}]
    return replace(b.pods_alone(b.rollout_pod(True, True, True)), workload=found, flavors={"tainted": FLAVOR})


def template(made: Plan, kind: str) -> Any:
    return b.child(made, kind)["spec"]["template"]


def test_pods_get_labels_and_tolerations_of_kueue_flavor() -> None:
    account = n.capacity(n.node(taints=[TAINT], labels={"gpu": "h200"}))
    assert kueue.flavors_of(assigned().workload) == ("tainted",)
    made = planned(queued(), account, assigned())
    assert b.condition(made, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    for kind in ("Deployment", "Job"):
        spec = template(made, kind)["spec"]
        assert (spec["tolerations"], spec["nodeSelector"]) == ([TOLERATION], {"gpu": "h200"})


def test_job_placement_is_kept_beside_kueue_flavor() -> None:
    own = {"key": "team", "operator": "Exists"}
    raw = queued(placement={"nodeSelector": {"zone": "a"}, "tolerations": [own, TOLERATION]})
    made = planned(raw, n.capacity(n.node(taints=[TAINT], labels={"gpu": "h200", "zone": "a"})), assigned(raw))
    spec = template(made, "Job")["spec"]
    assert [item["key"] for item in spec["tolerations"]] == ["team", "nvidia.com/gpu"]
    assert spec["nodeSelector"] == {"gpu": "h200", "zone": "a"}


def test_admission_check_adds_to_single_role_without_changing_own_labels() -> None:
    account = n.capacity(n.node(taints=[TAINT], labels={"gpu": "h200", "rack": "7"}))
    check = {"nodeSelector": {"rack": "7"}, "labels": {"seen": "yes", names.LABEL_JOB: "other"}}
    made = planned(queued(), account, assigned(**check))
    learner, rollout = template(made, "Job"), template(made, "Deployment")
    assert learner["spec"]["nodeSelector"] == {"gpu": "h200", "rack": "7"}
    assert (learner["metadata"]["labels"]["seen"], learner["metadata"]["labels"][names.LABEL_JOB]) == ("yes", "job-3v1")
    assert rollout["spec"]["nodeSelector"] == {"gpu": "h200"}


def test_pods_are_annotated_so_that_kueue_does_not_count_them_twice() -> None:
    made = planned(queued(), n.capacity(n.node(taints=[TAINT], labels={"gpu": "h200"})), assigned())
    for kind in ("Deployment", "Job"):
        annotations = template(made, kind)["metadata"]["annotations"]
        assert annotations["kueue.x-k8s.io/podset-required-topology"] == "kubernetes.io/hostname"


def test_flavor_edit_does_not_change_running_pods() -> None:
    account = n.capacity(n.node(taints=[TAINT], labels={"gpu": "h200"}))
    made = planned(queued(), account, assigned())
    running = replace(
        assigned(),
        deployment=b.child(made, "Deployment"),
        secret=b.secret(),
        learner=b.learner_job(made),
        pods=(b.rollout_pod(True, True, True), b.learner_pod()),
    )
    edited = replace(running, flavors={"tainted": {"spec": {"nodeLabels": {"gpu": "h200"}}}})
    after = planned(queued(), account, edited)
    assert after.deletions == ()
    written = comparison.writes(after.children, edited)
    assert not {"Deployment", "Job"} & {write.manifest["kind"] for write in written}


def without_kueue(raw: Any, observed: Observed = b.NOTHING) -> Plan:
    snapshot = n.capacity(n.node()).snapshot(n.KEY)
    settings = replace(b.SETTINGS, kueue=False)
    return b.plan(raw, observed, settings=settings, now=b.NOW, snapshot=snapshot)


def test_queue_without_kueue_support_is_reported_with_fix_and_nothing_is_written() -> None:
    made = without_kueue(queued())
    assert made.children == ()
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.KUEUE_DISABLED)
    text = b.message(made, reasons.QUOTA_RESERVED)
    assert "kueue.x-k8s.io/queue-name=team" in text
    assert "--set controller.kueue=true" in text
    assert "remove the label" in text
    quota = quota_step(queued(), made)
    assert (quota.state, quota.fix) == (
        "wrong",
        "controller.kueue of the chart, or the label kueue.x-k8s.io/queue-name of rmj/job-3v1",
    )
    assert b.condition(without_kueue(b.job()), reasons.QUOTA_RESERVED) is None


def test_running_job_continues_when_kueue_support_is_turned_off() -> None:
    made = without_kueue(queued(), b.started(b.job()))
    assert (made.children, made.deletions) == ((), ())


def test_pod_priority_class_counts_in_queue() -> None:
    high = {"metadata": {"name": "high"}, "value": 10}
    raw = queued(placement={"priorityClassName": "high"})
    spec = b.child(passed(raw, Observed(pod_priority_class=high)), "Workload")["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["name"]) == (10, "high")


def test_job_without_queue_has_no_workload() -> None:
    made = passed(b.job())
    assert "Workload" not in b.kinds(made)
    assert names.ROLE_QUOTA not in str(made.children)


PENDING = condition("QuotaReserved", "False")
URGENT = {"metadata": {"name": "urgent"}, "value": 1000}
REF = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "urgent"}


def labelled(**labels: str) -> Any:
    raw = queued()
    raw["metadata"]["labels"] |= {f"kueue.x-k8s.io/{key.replace('_', '-')}": value for key, value in labels.items()}
    return raw


def spec_of(raw: Any, observed: Observed, **more: Any) -> Any:
    return b.child(passed(raw, observed, **more), "Workload")["spec"]


def test_pending_job_changes_queue_with_its_label() -> None:
    observed = Observed(workload=workload(PENDING))
    made = passed(labelled(queue_name="other"), observed)
    (write,) = comparison.writes(made.children, observed)
    assert (write.verb, write.manifest["spec"]["queueName"]) == ("apply", "other")
    assert comparison.writes(passed(queued(), observed).children, observed) == []


def test_admitted_job_keeps_its_queue_when_label_changes() -> None:
    assert spec_of(labelled(queue_name="other"), Observed(workload=workload(*ADMITTED)))["queueName"] == "team"


def test_pending_job_without_queue_label_deletes_workload_and_admitted_one_keeps_it() -> None:
    waits, runs = Observed(workload=workload(PENDING)), Observed(workload=workload(*ADMITTED))
    assert passed(b.job(), waits).deletions == ("Workload",)
    assert passed(b.job(), runs).deletions == ()


def test_workload_priority_class_ranks_job_in_queue_but_not_its_pods() -> None:
    raw = labelled(priority_class="urgent")
    raw["spec"]["placement"] = {"priorityClassName": "high"}
    high = {"metadata": {"name": "high"}, "value": 10}
    spec = spec_of(raw, Observed(priority_class=URGENT, pod_priority_class=high))
    assert (spec["priority"], spec["priorityClassRef"]) == (1000, REF)
    assert {one["template"]["spec"]["priorityClassName"] for one in spec["podSets"]} == {"high"}


def test_workload_priority_is_not_changed_once_set() -> None:
    made = workload(*ADMITTED)
    made["spec"] |= {"priority": 7, "priorityClassRef": REF}
    spec = spec_of(labelled(), Observed(workload=made))
    assert (spec["priority"], spec["priorityClassRef"]) == (7, REF)


def test_missing_workload_priority_class_is_reported_and_no_quota_requested() -> None:
    raw = labelled(priority_class="urgent")
    made = passed(raw)
    assert (made.children, made.again_after_s) == ((), kueue.CLASS_AGAIN_S)
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.NO_PRIORITY_CLASS)
    assert "kueue.x-k8s.io/priority-class=urgent" in made.status["message"]
    quota = quota_step(raw, made)
    assert quota.state == "wrong"
    assert b.kinds(passed(raw, Observed(priority_class=URGENT))) == ["Workload"]


def test_workload_priority_class_without_queue_has_no_effect() -> None:
    raw = b.job()
    raw["metadata"]["labels"] = {kueue.PRIORITY_LABEL: "urgent"}
    assert kueue.priority_name(raw) is None
    assert b.condition(passed(raw), reasons.QUOTA_RESERVED) is None


def test_learner_job_suspended_by_default_queue_is_reported_with_fix() -> None:
    account = n.capacity(n.node())
    first = planned(b.job(), account)
    assert first.placement
    account.promise(n.KEY, first.placement.need, b.NODE)
    learner = b.learner_job(first)
    labels = {**learner["metadata"]["labels"], kueue.QUEUE_LABEL: "default"}
    metadata = {**learner["metadata"], "labels": labels, "creationTimestamp": AT}
    held = {**learner, "metadata": metadata, "spec": {**learner["spec"], "suspend": True}}
    observed = Observed(deployment=b.child(first, "Deployment"), learner=held, secret=b.secret())
    made = planned(b.job(), account, observed)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.QUEUED_TWICE)
    assert "RolloutMatchingJob.v1alpha1.stage2.dev to integrations.externalFrameworks" in made.status["message"]
    charged = Observed(
        workload=workload(*ADMITTED), deployment=b.child(first, "Deployment"), learner=held, secret=b.secret()
    )
    text = b.message(planned(queued(), account, charged), reasons.QUOTA_RESERVED)
    assert text.startswith("Kueue admitted the job through team; Kueue charges the learner's Job to the queue default")
    free = {**held, "spec": {**learner["spec"], "suspend": False}}
    on = planned(b.job(), account, Observed(deployment=b.child(first, "Deployment"), learner=free, secret=b.secret()))
    assert b.condition(on, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
