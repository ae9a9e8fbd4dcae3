"""ResourceQuotas: a job whose pods would exceed one waits, holds nothing, and starts once there is room."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller.job import kinds, names
from stage2_controller.job.names import Key
from stage2_controller.loop.work_queue import RetryLater
from stage2_controller.place.capacity import Capacity
from stage2_controller.place.placement import Place
from stage2_controller.place.quota import Quotas
from stage2_controller.plan.result import Plan
from stage2_controller.state import conditions, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.store import Store
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.fake_server import KEY, Life, Object, Server, reconciler
from tests.unit.controller.loop.test_reconcile import learner_pod

GPUS = f"requests.{n.GPU}"
OTHER = Key(KEY.namespace, "other")


def quota(hard: Any, used: Any = None, *, namespace: str = KEY.namespace, **spec: Any) -> Object:
    """A quota as its controller has counted it."""
    metadata = {"name": "gpus", "namespace": namespace, "uid": f"quota-of-{namespace}"}
    return {"metadata": metadata, "spec": {"hard": hard, **spec}, "status": {"hard": hard, "used": used or {}}}


class Cluster(Life):
    """Jobs in a namespace with a quota, nodes for all, and a clock."""

    def __init__(self, *jobs: Object, capacity: Capacity | None = None) -> None:
        self.now, self.woken = b.NOW, list[Key]()
        server, store = Server(), Store()
        for job in jobs or (b.job(),):
            server.add(job)
        self.account = capacity or n.capacity(n.node(gpus=16))
        super().__init__(server, store, reconciler(server, store, capacity=self.account, clock=lambda: self.now))
        self.reconciler.quotas.freed = self.woken.append

    def counts(self, *quotas: Object, change: str = "MODIFIED") -> None:
        """Let the watch report of quotas."""
        for body in quotas:
            self.reconciler.quotas.observe("ResourceQuota", {"type": change, "object": body})

    def placed(self, job: str = KEY.name) -> Any:
        """The condition Placed of a job."""
        status = self.server.objects[names.KIND, job].get("status") or {}
        return conditions.find(status, reasons.PLACED) or {}

    def pods_of(self, job: str = KEY.name) -> list[str]:
        """The kinds of a job's children that have pods."""
        return [kind for kind, name in self.server.objects if kind in kinds.ROLE_OF_PODS and name.startswith(job)]


async def test_job_over_quota_waits_with_message_and_holds_nothing() -> None:
    cluster = Cluster()
    cluster.counts(quota({GPUS: "8"}, {GPUS: "6"}))
    await cluster.one_pass()
    assert (cluster.placed()["status"], cluster.placed()["reason"]) == ("False", reasons.QUOTA_EXCEEDED)
    assert cluster.placed()["message"] == (
        "needs 4 requests.nvidia.com/gpu; ResourceQuota gpus of namespace team-a allows 8, and 6 are used or promised;"
        " the job has no pods meanwhile: wait for other pods to end, request less (spec.rollout, spec.learner), or"
        " ask the admin to raise the quota"
    )
    assert cluster.server.objects[names.KIND, KEY.name]["status"]["message"] == cluster.placed()["message"]
    assert cluster.server.written() == []
    assert cluster.account.snapshot(KEY).promised is None
    assert cluster.server.events == [reasons.QUOTA_EXCEEDED]


async def test_waiting_job_starts_as_soon_as_quota_has_room() -> None:
    cluster = Cluster()
    cluster.counts(quota({GPUS: "8"}, {GPUS: "6"}))
    await cluster.one_pass()
    cluster.counts(quota({GPUS: "8"}, {GPUS: "5"}))
    assert cluster.woken == []
    cluster.counts(quota({GPUS: "8"}, {GPUS: "4"}))
    assert cluster.woken == [KEY]
    await cluster.one_pass()
    assert cluster.pods_of() == ["Job", "Deployment"]
    assert cluster.placed()["reason"] == reasons.NODE_CHOSEN


async def test_deleted_quota_wakes_waiting_job() -> None:
    cluster = Cluster()
    known = quota({GPUS: "0"})
    cluster.counts(known)
    await cluster.one_pass()
    quotas = cluster.reconciler.quotas
    assert quotas.vanished("ResourceQuota", "team-b", set(), 9) == []
    assert quotas.vanished("ResourceQuota", None, {known["metadata"]["uid"]}, 9) == []
    (gone,) = quotas.vanished("ResourceQuota", KEY.namespace, set(), 9)
    cluster.counts(gone, change="DELETED")
    assert cluster.woken == [KEY]


async def test_starting_job_counts_against_quota_before_its_pods_exist() -> None:
    cluster = Cluster(b.job(), b.job(OTHER.name))
    cluster.counts(quota({GPUS: "6"}))
    await cluster.one_pass()
    await cluster.reconciler(OTHER)
    assert cluster.pods_of(OTHER.name) == []
    assert "allows 6, and 4 are used or promised" in cluster.placed(OTHER.name)["message"]


async def test_existing_pod_is_counted_once_against_quota() -> None:
    cluster = Cluster(b.job(), b.job(OTHER.name))
    cluster.counts(quota({GPUS: "8"}))
    await cluster.one_pass()
    cluster.store.put("Pod", learner_pod())
    cluster.counts(quota({GPUS: "8"}, {GPUS: "1"}))
    await cluster.reconciler(OTHER)
    assert cluster.pods_of(OTHER.name) == ["Job", "Deployment"]


async def test_first_of_two_waiting_jobs_is_woken_first() -> None:
    cluster = Cluster(b.job(), b.job(OTHER.name))
    cluster.counts(quota({GPUS: "4"}, {GPUS: "4"}))
    await cluster.one_pass()
    await cluster.reconciler(OTHER)
    cluster.counts(quota({GPUS: "4"}))
    assert cluster.woken == [KEY]
    cluster.reconciler.forget(KEY)  # it was deleted, and needs nothing
    assert cluster.woken == [KEY, OTHER]


async def test_job_with_refused_children_takes_no_quota_from_others() -> None:
    cluster = Cluster(b.job(), b.job(OTHER.name))
    cluster.counts(quota({GPUS: "4"}))
    cluster.server.refused["Service"] = "a webhook refuses it"
    with pytest.raises(RetryLater, match="webhook"):
        await cluster.one_pass()
    cluster.server.refused.clear()
    await cluster.reconciler(OTHER)
    assert cluster.pods_of(OTHER.name) == ["Job", "Deployment"]


@pytest.mark.parametrize("reason", [reasons.POD_REFUSED, reasons.QUEUED_TWICE])
async def test_job_with_permanently_refused_pods_takes_no_quota_from_others(reason: str) -> None:
    cluster = Cluster(b.job(), b.job(OTHER.name))
    cluster.counts(quota({GPUS: "4"}))
    await cluster.one_pass()
    quotas, parsed = cluster.reconciler.quotas, cluster.reconciler._parsed[KEY][1]
    refused = Place(parsed.need, node="node-a", tied=True, condition=Condition(reasons.PLACED, "False", reason, "no"))
    quotas.record(KEY, refused)
    assert quotas.exceeded(OTHER, parsed.need) is None


async def test_waiting_job_that_becomes_invalid_takes_no_quota_from_others() -> None:
    cluster = Cluster(b.job(), b.job(OTHER.name))
    cluster.counts(quota({GPUS: "4"}, {GPUS: "4"}))
    await cluster.one_pass()
    broken = b.job(rollout={"servers": 0})
    broken["metadata"] |= {"generation": 2, "resourceVersion": "99"}
    cluster.server.objects[names.KIND, KEY.name] |= {part: broken[part] for part in ("metadata", "spec")}
    cluster.server.unseen.append(("MODIFIED", cluster.server.objects[names.KIND, KEY.name]))
    await cluster.one_pass()
    cluster.counts(quota({GPUS: "4"}))
    await cluster.reconciler(OTHER)
    assert cluster.pods_of(OTHER.name) == ["Job", "Deployment"]


async def test_highest_priority_waiting_job_is_woken_first() -> None:
    cluster = Cluster(b.job(), b.job(OTHER.name))
    cluster.counts(quota({GPUS: "4"}, {GPUS: "4"}))
    await cluster.one_pass()
    await cluster.reconciler(OTHER)
    quotas = cluster.reconciler.quotas
    quotas._waiting[OTHER] = replace(quotas._waiting[OTHER], priority=7)
    cluster.counts(quota({GPUS: "4"}))
    assert cluster.woken == [OTHER]


async def test_running_job_is_not_affected_by_quota() -> None:
    cluster = Cluster()
    await cluster.one_pass()
    cluster.counts(quota({GPUS: "0"}))
    await cluster.one_pass()
    assert cluster.placed()["reason"] == reasons.NODE_CHOSEN
    assert cluster.pods_of() == ["Job", "Deployment"]


async def test_quota_retries_double_up_to_ten_minutes() -> None:
    cluster, pauses = Cluster(), list[float | None]()
    cluster.counts(quota({GPUS: "0"}))
    for _ in range(8):
        pauses.append(await cluster.one_pass())
        cluster.now += timedelta(seconds=pauses[-1] or 0)
    assert pauses == [30, 30, 60, 120, 240, 480, 600, 600]


def exceeded(body: Object, **spec: Any) -> str | None:
    """What a quota says to a new job."""
    made: Plan = b.planned(b.job(**spec))
    assert made.placement
    quotas = Quotas(Store())
    quotas.observe("ResourceQuota", {"type": "ADDED", "object": body})
    return quotas.exceeded(KEY, made.placement.need)


@pytest.mark.parametrize(
    ("hard", "words"),
    [
        ({GPUS: "3"}, "needs 4 requests.nvidia.com/gpu; ResourceQuota gpus of namespace team-a allows 3, and 0"),
        ({"cpu": "7"}, "needs 8 cpu; ResourceQuota gpus of namespace team-a allows 7"),
        ({"requests.cpu": "7500m"}, "needs 8 requests.cpu; ResourceQuota gpus of namespace team-a allows 7.5"),
        ({"requests.memory": "31Gi"}, "needs 32Gi requests.memory; ResourceQuota gpus of namespace team-a allows 31Gi"),
        ({"pods": "1"}, "needs 2 pods; ResourceQuota gpus of namespace team-a allows 1"),
        ({"count/pods": "1"}, "needs 2 count/pods"),
        ({"count/deployments.apps": "0"}, "needs 1 count/deployments.apps"),
        ({"count/jobs.batch": "0"}, "needs 1 count/jobs.batch"),
        ({"pods": "0", GPUS: "0"}, "needs 4 requests.nvidia.com/gpu"),
    ],
)
def test_exceeded_quota_of_each_kind_is_reported_with_what_is_needed(hard: Any, words: str) -> None:
    learner = {"gpus": 1, "resources": {"requests": {"cpu": "8", "memory": "32Gi"}}}
    assert str(exceeded(quota(hard), learner=learner)).startswith(words)


@pytest.mark.parametrize(
    "body",
    [
        quota({GPUS: "4", "pods": "2", "services": "0", "requests.storage": "0"}),
        quota({GPUS: "0"}, namespace="team-b"),
        quota({GPUS: "0"}, scopes=["BestEffort"]),
        quota({GPUS: "0"}, scopeSelector={"matchExpressions": [{"scopeName": "PriorityClass", "operator": "Exists"}]}),
        quota({"limits.memory": "0", "cpu": "0"}),
        {**quota({GPUS: "0"}), "status": {}},
    ],
    ids=["room", "another namespace", "scopes", "a selector of scopes", "no request", "not counted yet"],
)
def test_quota_with_room_or_undecidable_scope_does_not_block_job(body: Object) -> None:
    assert exceeded(body) is None


def test_job_larger_than_whole_quota_gets_advice_to_request_less() -> None:
    assert "meanwhile: request less" in str(exceeded(quota({GPUS: "3"})))


def test_quota_applies_in_scheduler_mode() -> None:
    raw = b.job(placement={"mode": "Scheduler"})
    made = b.plan(raw, replace(b.NOTHING, over_quota="needs too much"))
    assert (made.children, b.condition(made, reasons.PLACED)) == ((), ("False", reasons.QUOTA_EXCEEDED))
