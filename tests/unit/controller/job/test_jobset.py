"""Engine JobSet: one JobSet has all pods, and none of our own placement, queue or quota runs for its job."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from stage2_api.pod import layout
from stage2_controller.children.build import static_children
from stage2_controller.job import names
from stage2_controller.job.containers import containers
from stage2_controller.job.settings import AdminPolicy
from stage2_controller.loop.work_queue import RetryLater
from stage2_controller.place import node_fit
from stage2_controller.place.capacity import Capacity
from stage2_controller.report import explanation
from stage2_controller.state import conditions, jobset, reasons
from stage2_controller.state.store import Store
from tests.unit.controller import builders as b
from tests.unit.controller.fake_server import KEY, Life, Object, Server, reconciler

OWN_SCHEDULING = tuple(str(Path(jobset.__file__).parents[1] / room) for room in ("place", "queue"))
JOBSET = "job-3v1-jobset"
SERVERS = f"{JOBSET}-rollout-0"
QUEUED = {names.LABEL_QUEUE: "team", names.LABEL_PRIORITY: "urgent"}


def job(*, labels: Object | None = None, **spec: Any) -> Object:
    """A job with four servers in two pods."""
    made = b.job()
    made["spec"] |= {"engine": "JobSet", "rollout": {"servers": 4, "serversPerPod": 2}, **spec}
    return {**made, "metadata": {**made["metadata"], "labels": labels or {}}}


def written(**spec: Any) -> dict[str, Any]:
    """The static children of such a job, by their kinds."""
    return {item["kind"]: item for item in static_children(parse_job(job(**spec)), content={"token": "t"})}


def replicated(made: Any, name: str) -> Any:
    """One of the JobSet's replicated jobs, as (replicas, spec of its Job)."""
    (found,) = [one for one in made["spec"]["replicatedJobs"] if one["name"] == name]
    return found["replicas"], found["template"]["spec"]


def test_rollout_pods_share_config_and_find_servers_by_pod_index() -> None:
    made = written()
    assert set(made) == {"Secret", "ConfigMap", "NetworkPolicy", "JobSet"}
    replicas, rollout = replicated(made["JobSet"], "rollout")
    pod = rollout["template"]["spec"]
    assert (replicas, rollout["parallelism"]) == (1, 2)
    assert [one["name"] for one in pod["containers"]] == ["server-0", "server-1"]
    assert pod["containers"][1]["command"][-2:] == ["1", "--pod=$(STAGE2_POD)"]
    assert pod["containers"][1]["env"][-1]["valueFrom"]["fieldRef"]["fieldPath"].endswith("/job-completion-index']")
    config = yaml.safe_load(made["ConfigMap"]["data"][layout.CONFIG_KEY])
    servers = config["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"]
    where = f"https://{JOBSET}-rollout-0-{{}}.{JOBSET}.team-a.svc:{{}}"
    assert [one["base_url"] for one in servers] == [where.format(pod, port) for pod in (0, 1) for port in (8000, 8001)]
    assert [one["group_port"] for one in servers] == [layout.GROUP_PORT + index for index in range(4)]


def test_learner_result_ends_jobset_and_failed_server_restarts_alone() -> None:
    spec = written()["JobSet"]["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["learner"]}
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    _, learner = replicated({"spec": spec}, "learner")
    assert learner["podFailurePolicy"]["rules"][0]["action"] == "FailJob"
    assert (learner["completions"], learner["backoffLimit"]) == (1, 3)
    _, rollout = replicated({"spec": spec}, "rollout")
    assert rollout["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert rollout["backoffLimitPerIndex"] == 2**31 - 1


SHARDED = {"custom": {"extra": {"rollout_matching": {"vllm": {"server": {"learners": "sharded"}}}}}}


@pytest.mark.parametrize(("mode", "spec"), [(b.COLOCATE, {"rollout": {}}), (SHARDED, {})], ids=["colocate", "servers"])
def test_learner_pods_rendezvous_at_first_pod_and_accept_all_ports_from_each_other(mode: Object, spec: Object) -> None:
    made = written(config=b.job(config=mode)["spec"]["config"], learner={"gpus": 8, "nodes": 2}, **spec)
    replicas, learner = replicated(made["JobSet"], "learner")
    assert (replicas, learner["completions"], learner["parallelism"], learner["backoffLimit"]) == (1, 2, 2, 6)
    meeting = f"{JOBSET}-learner-0-0.{JOBSET}.team-a.svc:{layout.RENDEZVOUS_PORT}"
    (process,) = learner["template"]["spec"]["containers"]
    assert process["command"][3:] == ["--processes=8", f"--node=$(JOB_COMPLETION_INDEX)/2@{meeting}"]
    assert made["NetworkPolicy"]["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP"}]


def test_local_run_gives_each_server_own_port() -> None:
    local = containers(parse_job(job()), host_for=lambda _: "127.0.0.1", tls=True)
    assert [one.port for one in local.servers] == [8000, 8001, 8002, 8003]
    assert [one.command[-2:] for one in local.servers] == [("--server", str(index)) for index in range(4)]


def test_topology_queue_and_ttl_are_passed_to_jobset() -> None:
    key = "topology.kubernetes.io/zone"
    preferred = written(placement={"topologyKey": key}, labels=QUEUED)["JobSet"]
    assert QUEUED.items() <= preferred["metadata"]["labels"].items()
    for role in ("rollout", "learner"):
        (term,) = replicated(preferred, role)[1]["template"]["spec"]["affinity"]["podAffinity"].popitem()[1]
        assert term["podAffinityTerm"]["topologyKey"] == key
    own = written(placement={"topologyKey": key, "topology": "Exclusive"}, suspend=True, ttlSecondsAfterFinished=0)
    servers, learner = (one["template"] for one in own["JobSet"]["spec"]["replicatedJobs"])
    assert servers["metadata"]["annotations"] == {"alpha.jobset.sigs.k8s.io/exclusive-topology": key}
    assert "affinity" not in servers["spec"]["template"]["spec"]
    ((together,), (apart,)) = (
        one[node_fit.REQUIRED] for one in learner["spec"]["template"]["spec"]["affinity"].values()
    )
    assert together["topologyKey"] == apart["topologyKey"] == key
    assert together["labelSelector"]["matchLabels"]["stage2.dev/role"] == "learner"
    assert (apart["mismatchLabelKeys"], apart["namespaceSelector"]) == (["jobset.sigs.k8s.io/job-key"], {})
    assert apart["matchLabelKeys"] == ["jobset.sigs.k8s.io/priority"], "as JobSet's own rule"
    replicas, rollout = replicated(own["JobSet"], "rollout")
    assert (replicas, rollout["parallelism"], rollout["completions"]) == (2, 1, 1), "a domain for each pod"
    index = rollout["template"]["spec"]["containers"][0]["env"][-1]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index.endswith("/job-index']")
    assert f"{JOBSET}-rollout-1-0.{JOBSET}" in own["ConfigMap"]["data"][layout.CONFIG_KEY]
    assert (own["JobSet"]["spec"]["suspend"], own["JobSet"]["spec"]["ttlSecondsAfterFinished"]) == (True, 0)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"engine": "Node"}, "spec.rollout.serversPerPod"),
        ({"engine": "Node", "rollout": {"servers": 17}}, "spec.rollout.servers"),
        ({"engine": "Node", "rollout": {"servers": 1}, "learner": {"nodes": 2}}, "spec.learner.nodes"),
        (
            {"engine": "Node", "rollout": {"servers": 1}, "placement": {"topologyKey": "a"}},
            "spec.placement.topologyKey",
        ),
        ({"rollout": {"servers": 4, "serversPerPod": 3}}, "spec.rollout.servers"),
        ({"rollout": {"servers": 257}}, "spec.rollout.servers"),
        ({"learner": {"nodes": 2}}, "spec.learner.nodes"),
        ({"placement": {"topology": "Exclusive"}}, "spec.placement.topology"),
    ],
)
def test_unsupported_option_of_engine_is_refused_by_field_name(spec: Object, path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_job(job(**spec))
    assert path in [problem.path for problem in refused.value.problems]


# --- The controller's passes.


@pytest.fixture
def life() -> Life:
    """A new job in a queue on a server, and a controller that also chooses nodes."""
    server, store = Server(), Store()
    server.add(job(labels=QUEUED))
    capacity = Capacity(lambda: None)
    life = Life(server, store, reconciler(server, store, capacity=capacity))
    life.reconciler.quotas.observe("ResourceQuota", {"type": "ADDED", "object": _EMPTY_QUOTA})
    return life


_EMPTY_QUOTA = {
    "metadata": {"name": "none", "namespace": "team-a", "uid": "quota"},
    "spec": {},
    "status": {"hard": {"pods": "0"}, "used": {"pods": "0"}},
}


@contextmanager
def traced() -> Iterator[set[str]]:
    """The functions of our own scheduling that run meanwhile."""
    found: set[str] = set()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN_SCHEDULING):
            found.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


def pod(
    life: Life,
    role: str,
    index: int,
    *statuses: Object,
    node: str | None = "n",
    spec: Object | None = None,
    **status: Any,
) -> None:
    """A pod of the JobSet, as a watch reports it."""
    made = b.pod(role, *statuses, node=node, name=f"{JOBSET}-{role}-0-{index}-x", **status)
    annotations = {names.ANNOTATION_JOB: KEY.name, names.ANNOTATION_JOB_UID: "uid-of-job-3v1"}
    labels = {**made["metadata"]["labels"], names.LABEL_POD_INDEX: str(index)}
    owner = {"kind": "Job", "controller": True, "uid": "j", "apiVersion": "batch/v1"}
    metadata = {**made["metadata"], "annotations": annotations, "labels": labels, "ownerReferences": [owner]}
    life.server.add({**made, "kind": "Pod", "metadata": metadata, "spec": {**made["spec"], **(spec or {})}})


def condition(life: Life, kind: str) -> tuple[str, str] | None:
    status = life.server.objects[names.KIND, KEY.name]["status"]
    return next(((one["status"], one["reason"]) for one in status["conditions"] if one["type"] == kind), None)


def ends(life: Life, kind: str, reason: str = "") -> None:
    """JobSet's own controller reports an end."""
    found = copy.deepcopy(life.server.objects["JobSet", JOBSET])
    found["status"] = {"conditions": [{"type": kind, "status": "True", "reason": reason, "message": "m"}]}
    life.server.put(found)


async def runs(life: Life, *, queued: bool = True) -> None:
    """Kueue admits the JobSet, two pods answer, and the learner runs."""
    await life.one_pass()
    made = life.server.objects["JobSet", JOBSET]
    life.server.put({**made, "spec": {**made["spec"], **({"suspend": False} if queued else {})}})
    _, servers = replicated(made, "rollout")
    owner = {
        "kind": "JobSet",
        "controller": True,
        "uid": made["metadata"]["uid"],
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
    }
    metadata = {"name": SERVERS, "namespace": "team-a", "ownerReferences": [owner]}
    life.server.put({"kind": "Job", "metadata": metadata, "spec": servers})
    for index in (0, 1):
        pod(life, "rollout", index, b.up("server-0"), b.up("server-1"))
    pod(life, "learner", 0, b.up("learner"))
    await life.one_pass()


async def test_jobset_job_never_runs_own_placement_or_quota_code(life: Life) -> None:
    with traced() as found:
        await life.one_pass()
        assert life.server.written() == ["Secret", "ConfigMap", "NetworkPolicy", "JobSet"]
        made = life.server.objects["JobSet", JOBSET]
        life.server.put({**made, "spec": {**made["spec"], "suspend": True}})  # as Kueue's webhook does
        await life.one_pass()
        assert condition(life, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_PENDING)
        await runs(life)
        assert condition(life, reasons.QUOTA_RESERVED) == ("True", reasons.ADMITTED)
        status = life.server.objects[names.KIND, KEY.name]["status"]
        assert (status["phase"], status["rollout"]) == ("Running", "4/4")
        assert [one["name"] for one in status["servers"]] == [f"server-{index}" for index in range(4)]
        assert condition(life, reasons.PLACED) is None
        pod(life, "learner", 0, b.down("learner", 0), phase="Succeeded")
        await life.one_pass()
        assert condition(life, reasons.SUCCEEDED) == ("True", reasons.LEARNER_SUCCEEDED)
        assert ("delete", "JobSet") not in life.server.requests, "JobSet releases the servers, and logs stay"
        life.reconciler.forget(KEY)
    assert found == set()


async def test_suspended_job_deletes_jobset_and_new_one_waits_for_old_pods(life: Life) -> None:
    await runs(life)
    life.server.add(job(suspend=True), generation=2)
    await life.one_pass()
    assert ("JobSet", JOBSET) not in life.server.objects
    life.server.add(job(), generation=3)
    await life.one_pass()
    assert ("JobSet", JOBSET) not in life.server.objects, "the old learner still writes its checkpoint"
    for role, index in (("rollout", 0), ("rollout", 1), ("learner", 0)):
        life.server.remove("Pod", f"{JOBSET}-{role}-0-{index}-x")
    await life.one_pass()
    assert ("JobSet", JOBSET) in life.server.objects


async def test_jobset_gets_new_secret_only_after_pods_with_old_one_are_gone(life: Life) -> None:
    await runs(life)
    pods = [name for kind, name in life.server.objects if kind == "Pod"]
    old = life.server.objects["Secret", "job-3v1-token"]["metadata"]["uid"]
    life.server.remove("Secret", "job-3v1-token")
    life.reconciler.forget(KEY)  # a minute has passed
    await life.one_pass()
    for name in pods:
        pod = life.server.objects["Pod", name]
        ending = {**pod["metadata"], "deletionTimestamp": "2026-01-02T03:04:05Z"}
        life.server.add({**pod, "metadata": ending, "status": {**pod["status"], "phase": "Failed"}})
    await life.one_pass()
    assert not {"JobSet", "Secret"} & {kind for kind, _ in life.server.objects}
    for name in pods:
        life.server.remove("Pod", name)
    await life.one_pass()
    assert ("JobSet", JOBSET) in life.server.objects
    assert life.server.objects["Secret", "job-3v1-token"]["metadata"]["uid"] != old


@pytest.mark.parametrize(
    ("reason", "code", "expected"),
    [
        ("FailJobSetFailurePolicyAction", 64, reasons.CONFIGURATION_ERROR),
        ("ReachedMaxRestarts", 1, reasons.BACKOFF_LIMIT),
    ],
)
async def test_failed_jobset_fails_job_with_reason(life: Life, reason: str, code: int, expected: str) -> None:
    await runs(life)
    pod(life, "learner", 0, b.down("learner", code, "why"), phase="Failed")
    assert await life.one_pass() == jobset.SETTLES_S
    ends(life, "Failed", reason)
    await life.one_pass()
    assert condition(life, reasons.FAILED) == ("True", expected)


async def test_server_configuration_error_fails_whole_job(life: Life) -> None:
    await runs(life)
    pod(life, "rollout", 1, b.up("server-0"), b.down("server-1", 64, "no such model"))
    await life.one_pass()
    assert condition(life, reasons.FAILED) == ("True", reasons.CONFIGURATION_ERROR)
    assert "server-3" in life.server.objects[names.KIND, KEY.name]["status"]["message"]
    assert ("JobSet", JOBSET) not in life.server.objects


async def test_missing_rollout_pod_lowers_number_of_ready_servers(life: Life) -> None:
    await runs(life)
    life.server.remove("Pod", f"{JOBSET}-rollout-0-1-x")
    await life.one_pass()
    status = life.server.objects[names.KIND, KEY.name]["status"]
    assert (status["rollout"], status["phase"]) == ("2/4", "Running")
    assert condition(life, reasons.ROLLOUT_READY) == ("False", reasons.CONTAINERS_STARTING)


def loading(life: Life, index: int, *, bound_s: float) -> None:
    """A rollout pod that the scheduler bound then, and whose servers load."""
    at = conditions.timestamp(b.NOW + timedelta(seconds=bound_s))
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}
    servers = (b.up("server-0", ready=False), b.up("server-1", ready=False))
    pod(life, "rollout", index, *servers, conditions=[bound])


@pytest.mark.parametrize("given_s", [None, 50])
@pytest.mark.parametrize("first", [0, 1])
async def test_start_deadline_counts_from_when_last_pod_got_its_node(
    life: Life, first: int, given_s: float | None
) -> None:
    """Half of a job held its GPUs without end."""

    async def failed(*, after_s: float) -> tuple[str, str] | None:
        life.reconciler._clock = lambda: b.NOW + timedelta(seconds=after_s)
        await life.one_pass()
        return condition(life, reasons.FAILED)

    life.server.add(job(learner={"gpus": 1, "startDeadlineSeconds": 60}))
    await life.one_pass()
    pod(life, "learner", 0, b.waiting("learner", "PodInitializing"))
    loading(life, first, bound_s=0)
    assert await failed(after_s=59) is None, "the other pod does not exist yet"
    pod(life, "rollout", 1 - first, node=None)
    if given_s is not None:
        loading(life, 1 - first, bound_s=given_s)
    last_s = 60 + (given_s or 0)
    assert await failed(after_s=last_s - 1) is None
    assert await failed(after_s=last_s) == ("True", reasons.START_DEADLINE)


async def test_unschedulable_rollout_pod_is_reported_beside_waiting_one(life: Life) -> None:
    await runs(life, queued=False)
    refused = {
        "type": "PodScheduled",
        "status": "False",
        "message": "no GPU is free",
        "lastTransitionTime": conditions.timestamp(b.NOW),
    }
    for waiting in (1, 0):
        pod(life, "rollout", waiting, node=None)
        pod(life, "rollout", 1 - waiting, node=None, conditions=[refused])
        await life.one_pass()
        assert condition(life, reasons.ROLLOUT_READY) == ("False", reasons.UNSCHEDULABLE)
        assert "no GPU is free" in life.server.objects[names.KIND, KEY.name]["status"]["message"]


async def test_rollout_pods_with_resource_claims_are_ready_and_missing_claim_is_reported(life: Life) -> None:
    claims = {"resourceClaimTemplate": "one-gpu"}
    life.server.add(job(rollout={"servers": 4, "serversPerPod": 2, **claims}, learner={"gpus": 1, **claims}))
    await runs(life, queued=False)
    template = replicated(life.server.objects["JobSet", JOBSET], "rollout")[1]["template"]["spec"]
    wanted = {"resourceClaims": template["resourceClaims"]}
    there = {"resourceClaimStatuses": [{"name": one["name"]} for one in template["resourceClaims"]]}
    for index in (0, 1):
        pod(life, "rollout", index, b.up("server-0"), b.up("server-1"), spec=wanted, **there)
    await life.one_pass()
    assert condition(life, reasons.ROLLOUT_READY) == ("True", reasons.SERVERS_READY)
    pod(life, "rollout", 1, node=None, spec=wanted)
    await life.one_pass()
    assert condition(life, reasons.ROLLOUT_READY) == ("False", reasons.UNSCHEDULABLE)
    assert "ResourceClaimTemplate one-gpu" in life.server.objects[names.KIND, KEY.name]["status"]["message"]


async def test_configuration_error_of_second_learner_pod_ends_job_with_its_message(life: Life) -> None:
    life.server.add(job(config=b.job(config=SHARDED)["spec"]["config"], learner={"gpus": 1, "nodes": 2}))
    await runs(life, queued=False)
    pod(life, "learner", 0, b.down("learner", 75, "a process of the run is gone"), phase="Failed")
    pod(life, "learner", 1, b.down("learner", 64, "no such image root"), phase="Failed")
    ends(life, "Failed", "FailJobSetFailurePolicyAction")
    await life.one_pass()
    assert condition(life, reasons.FAILED) == ("True", reasons.CONFIGURATION_ERROR)
    assert "no such image root" in life.server.objects[names.KIND, KEY.name]["status"]["message"]


async def test_missing_jobset_crd_is_reported_with_install_command(life: Life) -> None:
    life.server.refused["JobSet"], life.server.refused_with = "404 page not found", 404
    with pytest.raises(RetryLater):
        await life.one_pass()
    assert life.children_applied() == ("False", reasons.JOBSET_MISSING)
    found = life.server.objects[names.KIND, KEY.name]
    assert jobset.INSTALL in found["status"]["message"]
    assert explanation.first(explanation.chain(found)).fix.startswith("the command")


def scaled(life: Life, servers: int) -> None:
    """Somebody sets the number of servers, as `kubectl scale` does."""
    life.server.requests.clear()
    made = life.server.objects[names.KIND, KEY.name]
    rollout = {**made["spec"]["rollout"], "servers": servers}
    life.server.add({**made, "spec": {**made["spec"], "rollout": rollout}}, generation=servers)


def size(life: Life) -> tuple[int, int]:
    """The pods of the servers' Job, and its completions."""
    spec = life.server.objects["Job", SERVERS]["spec"]
    return spec["parallelism"], spec["completions"]


@pytest.mark.parametrize("servers", [8, 2])
async def test_changed_server_count_scales_running_job_without_restart(life: Life, servers: int) -> None:
    await runs(life, queued=False)
    scaled(life, servers)
    await life.one_pass()
    assert size(life) == (servers // 2, servers // 2)
    assert life.server.written() == ["ConfigMap", "NetworkPolicy", "Job"], "files come first"
    assert "delete" not in {verb for verb, _ in life.server.requests}
    status = life.server.objects[names.KIND, KEY.name]["status"]
    assert (listed(life), status["replicas"], status["phase"]) == (servers, servers, "Running")
    assert status["selector"] == "stage2.dev/job=job-3v1,stage2.dev/role=rollout"
    life.server.requests.clear()
    await life.one_pass()
    assert life.server.written() == []


def listed(life: Life) -> int:
    """The servers that a learner finds, and waits for when it starts."""
    config = yaml.safe_load(life.server.objects["ConfigMap", "job-3v1-config"]["data"][layout.CONFIG_KEY])
    return len(config["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"])


@pytest.mark.parametrize(("kind", "name"), [("JobSet", JOBSET), ("Job", SERVERS)])
async def test_servers_being_deleted_are_not_scaled(life: Life, kind: str, name: str) -> None:
    await runs(life, queued=False)
    deleted = life.server.objects[kind, name]
    life.server.put(deleted, deletionTimestamp=conditions.timestamp(b.NOW))
    scaled(life, 8)
    await life.one_pass()
    assert size(life)[0] == 2


async def test_foreign_servers_job_is_not_scaled(life: Life) -> None:
    await runs(life, queued=False)
    metadata = {"name": SERVERS, "namespace": "team-a"}
    life.server.put({**life.server.objects["Job", SERVERS], "metadata": metadata})
    scaled(life, 8)
    await life.one_pass()
    assert size(life)[0] == 2


async def test_queued_job_scales_only_up_to_servers_admitted_by_kueue(life: Life) -> None:
    await runs(life)
    scaled(life, 8)
    await life.one_pass()
    assert (size(life)[0], listed(life)) == (2, 4)
    status = life.server.objects[names.KIND, KEY.name]["status"]
    assert (status["replicas"], status["rollout"]) == (4, "4/4")
    found = life.server.objects[names.KIND, KEY.name]["status"]["conditions"]
    (reserved,) = [one for one in found if one["type"] == reasons.QUOTA_RESERVED]
    assert reserved["message"].endswith("with 2 rollout pods; suspend and resume the job to ask for all 4")
    scaled(life, 2)
    await life.one_pass()
    assert size(life) == (1, 1)
    scaled(life, 4)
    await life.one_pass()
    assert size(life) == (2, 2), "what it gave back is still its own"


async def test_scaling_up_respects_largest_job_of_admin_policy(life: Life) -> None:
    five = replace(b.SETTINGS, policy=AdminPolicy(largest_job={"*": 5}))
    life.reconciler._settings = five
    await runs(life, queued=False)
    scaled(life, 6)
    await life.one_pass()
    assert (size(life)[0], listed(life)) == (2, 4)
    assert condition(life, reasons.ACCEPTED) == ("True", reasons.NO_LONGER_VALID)


async def test_failed_job_runs_again_after_server_count_is_corrected(life: Life) -> None:
    await runs(life, queued=False)
    pod(life, "learner", 0, b.down("learner", 1, "why"), phase="Failed")
    ends(life, "Failed", "ReachedMaxRestarts")
    await life.one_pass()
    assert life.server.objects[names.KIND, KEY.name]["status"]["phase"] == reasons.FAILED
    scaled(life, 4)  # edited, but not its number
    await life.one_pass()
    assert life.server.objects[names.KIND, KEY.name]["status"]["phase"] == reasons.FAILED
    scaled(life, 2)
    await life.one_pass()
    assert ("JobSet", JOBSET) not in life.server.objects, "of the failed attempt"
    for role, index in (("rollout", 0), ("rollout", 1), ("learner", 0)):
        life.server.remove("Pod", f"{JOBSET}-{role}-0-{index}-x")
    await life.one_pass()
    _, servers = replicated(life.server.objects["JobSet", JOBSET], "rollout")
    assert (servers["parallelism"], listed(life)) == (1, 2)
    assert life.server.objects[names.KIND, KEY.name]["status"]["phase"] == reasons.PENDING
