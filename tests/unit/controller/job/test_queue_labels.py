"""Labels of a job in a queue: which queue, which rank in it, and what becomes of its Workload when they change."""

from typing import Any

from stage2_controller import reasons
from stage2_controller.children import comparison
from stage2_controller.observed import Observed
from stage2_controller.queue import kueue
from stage2_controller.report import explanation
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_kueue import ADMITTED, AT, condition, queued, workload
from tests.unit.controller.job.test_placement import planned

PENDING = condition("QuotaReserved", "False")
URGENT = {"metadata": {"name": "urgent"}, "value": 1000}
REF = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "urgent"}


def labelled(**labels: str) -> Any:
    raw = queued()
    raw["metadata"]["labels"] |= {f"kueue.x-k8s.io/{key.replace('_', '-')}": value for key, value in labels.items()}
    return raw


def spec_of(raw: Any, observed: Observed, **more: Any) -> Any:
    return b.child(planned(raw, n.capacity(n.node()), observed, **more), "Workload")["spec"]


def test_a_job_that_waits_changes_its_queue_with_its_label() -> None:
    observed = Observed(workload=workload(PENDING))
    made = planned(labelled(queue_name="other"), n.capacity(n.node()), observed)
    (write,) = comparison.writes(made.children, observed)
    assert (write.verb, write.manifest["spec"]["queueName"]) == ("apply", "other")
    assert comparison.writes(planned(queued(), n.capacity(n.node()), observed).children, observed) == []


def test_a_job_that_has_quota_keeps_its_queue() -> None:
    assert spec_of(labelled(queue_name="other"), Observed(workload=workload(*ADMITTED)))["queueName"] == "team"


def test_a_job_that_leaves_the_queue_takes_its_place_in_it_along() -> None:
    waits, runs = Observed(workload=workload(PENDING)), Observed(workload=workload(*ADMITTED))
    assert planned(b.job(), n.capacity(n.node()), waits).deletions == ("Workload",)
    assert planned(b.job(), n.capacity(n.node()), runs).deletions == ()


def test_a_class_of_kueues_own_ranks_the_job_in_its_queue_and_not_its_pods() -> None:
    raw = labelled(priority_class="urgent")
    raw["spec"]["placement"] = {"priorityClassName": "high"}
    high = {"metadata": {"name": "high"}, "value": 10}
    spec = spec_of(raw, Observed(priority_class=URGENT, pod_priority_class=high))
    assert (spec["priority"], spec["priorityClassRef"]) == (1000, REF)
    assert {one["template"]["spec"]["priorityClassName"] for one in spec["podSets"]} == {"high"}


def test_a_rank_that_was_given_is_never_sent_otherwise() -> None:
    made = workload(*ADMITTED)
    made["spec"] |= {"priority": 7, "priorityClassRef": REF}
    spec = spec_of(labelled(), Observed(workload=made))
    assert (spec["priority"], spec["priorityClassRef"]) == (7, REF)


def test_a_class_that_does_not_exist_is_named_and_no_quota_is_asked_for() -> None:
    raw = labelled(priority_class="urgent")
    made = planned(raw, n.capacity(n.node()))
    assert (made.children, made.again_after_s) == ((), kueue.CLASS_AGAIN_S)
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.NO_PRIORITY_CLASS)
    assert "kueue.x-k8s.io/priority-class=urgent" in made.status["message"]
    (quota,) = [step for step in explanation.chain(b.told(raw, made)) if step.name == "quota"]
    assert quota.state == "wrong"
    assert b.kinds(planned(raw, n.capacity(n.node()), Observed(priority_class=URGENT))) == ["Workload"]


def test_a_class_without_a_queue_says_nothing() -> None:
    raw = b.job()
    raw["metadata"]["labels"] = {kueue.PRIORITY_LABEL: "urgent"}
    assert kueue.priority_name(raw) is None
    assert b.condition(planned(raw, n.capacity(n.node())), reasons.QUOTA_RESERVED) is None


def test_a_learner_that_kueue_took_for_a_job_of_its_own_says_what_to_configure() -> None:
    account = n.capacity(n.node())
    first = planned(b.job(), account)
    assert first.placement
    account.promise(n.KEY, first.placement.need, b.NODE)
    learner = b.learner_job(first)
    labels = {**learner["metadata"]["labels"], kueue.QUEUE_LABEL: "default"}
    metadata = {**learner["metadata"], "labels": labels, "creationTimestamp": AT}
    held = {**learner, "metadata": metadata, "spec": {**learner["spec"], "suspend": True}}
    observed = Observed(deployment=b.child(first, "Deployment"), learner=held)
    made = planned(b.job(), account, observed)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.QUEUED_TWICE)
    assert "RolloutMatchingJob.v1alpha1.stage2.dev to integrations.externalFrameworks" in made.status["message"]
    charged = Observed(workload=workload(*ADMITTED), deployment=b.child(first, "Deployment"), learner=held)
    told = b.message(planned(queued(), account, charged), reasons.QUOTA_RESERVED)
    assert told.startswith("Kueue admitted the job through team; Kueue charges the learner's Job to the queue default")
    free = {**held, "spec": {**learner["spec"], "suspend": False}}
    on = planned(b.job(), account, Observed(deployment=b.child(first, "Deployment"), learner=free))
    assert b.condition(on, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
