"""Passes over one job on an API server that is a dictionary: whose objects are read, written and deleted."""

import copy
from datetime import timedelta

import pytest

from stage2_api.pod import layout
from stage2_controller.children import manifest
from stage2_controller.job import kinds, names
from stage2_controller.loop.work_queue import RetryLater
from stage2_controller.queue import kueue
from stage2_controller.state import conditions, reasons
from stage2_controller.state.store import Store
from tests.unit.controller import builders as b
from tests.unit.controller.fake_server import KEY, WATCHED, Life, Object, Server, reconciler

CONFIG, TOKEN = ("ConfigMap", "job-3v1-config"), ("Secret", "job-3v1-token")
DEPLOYMENT = ("Deployment", "job-3v1-rollout")


@pytest.fixture
def life() -> Life:
    """A new job on a server, and a controller that knows of nothing yet."""
    server, store = Server(), Store()
    server.add(b.job())
    return Life(server, store, reconciler(server, store))


def learner_pod() -> Object:
    """The learner's pod, as a watch reports it."""
    pod = b.learner_pod()
    own = {names.ANNOTATION_JOB: KEY.name, names.ANNOTATION_JOB_UID: b.job()["metadata"]["uid"]}
    return {**pod, "metadata": {**pod["metadata"], "resourceVersion": "9", "annotations": own}}


def foreign(kind: str) -> Object:
    """An object of somebody else under the name of a child."""
    child = copy.deepcopy(b.child(b.planned(b.job()), kind))
    del child["metadata"]["ownerReferences"], child["metadata"]["labels"]
    return child


async def test_new_job_writes_each_child_once_and_status_once(life: Life) -> None:
    await life.one_pass()
    made = [(verb, kind) for verb, kind in life.server.requests if verb != "get"]
    assert [kind for verb, kind in made if verb == "create"] == ["Secret", "Job"], "they are never written again"
    assert made[-1] == ("apply", "status")
    assert life.server.written() == ["Secret", "ConfigMap", "NetworkPolicy", "Service", "Job", "Deployment"]
    life.server.requests.clear()
    await life.one_pass()
    assert life.server.requests == []


async def test_written_objects_are_in_store_before_watch_events(life: Life) -> None:
    await life.one_pass()
    written = {kind for kind, _ in life.server.objects if kind != names.KIND} - {"Secret", "ConfigMap"}
    assert {kind for kind in WATCHED if kind != names.KIND and list(life.store.all_of(kind))} == written
    assert life.store.one(names.KIND, KEY, KEY.name) == life.server.objects[names.KIND, KEY.name]


async def test_deleted_objects_leave_store_before_watch_events(life: Life) -> None:
    await life.one_pass()
    life.server.add(b.job(suspend=True), generation=2)
    await life.one_pass()
    assert ("delete", "Deployment") in life.server.requests
    life.server.requests.clear()
    await life.one_pass()
    assert life.server.requests == [("apply", "status")], "which says that no pod is left"


@pytest.mark.parametrize("deleted", [CONFIG, TOKEN], ids=["ConfigMap", "Secret"])
async def test_config_or_secret_deleted_during_suspension_is_recreated(life: Life, deleted: tuple[str, str]) -> None:
    await life.one_pass()
    life.server.add(b.job(suspend=True), generation=2)
    await life.one_pass()
    life.server.remove(*deleted)
    life.server.add(b.job(), generation=3)
    await life.one_pass()
    assert deleted in life.server.objects


async def passes_for(life: Life, seconds: float, clock: list[float]) -> None:
    """Make the passes that are due within so many seconds."""
    end = clock[0] + seconds
    while True:
        again_after_s = await life.one_pass() or 1.0  # the watches report what a pass has created
        if clock[0] + again_after_s > end:
            return
        clock[0] += again_after_s


async def test_edited_configmap_is_restored_within_minute() -> None:
    server, store, clock = Server(), Store(), [0.0]
    server.add(b.job())
    life = Life(server, store, reconciler(server, store, clock=lambda: b.NOW + timedelta(seconds=clock[0])))
    await passes_for(life, 300, clock)
    mine = copy.deepcopy(server.objects[CONFIG])
    server.objects[CONFIG] = {**mine, "data": {layout.CONFIG_KEY: "training: {seed: 666}"}}
    await passes_for(life, 60, clock)
    assert server.objects[CONFIG]["data"] == mine["data"]


async def test_deleted_secret_is_noticed_within_minute() -> None:
    server, store, clock = Server(), Store(), [0.0]
    server.add(b.job())
    life = Life(server, store, reconciler(server, store, clock=lambda: b.NOW + timedelta(seconds=clock[0])))
    await passes_for(life, 100, clock)
    server.remove(*TOKEN)
    await passes_for(life, 60, clock)
    assert ("delete", "Job") in server.requests, "its pods hold another token than new ones would"


async def test_lingering_pod_of_waiting_job_does_not_trigger_secret_renewal(life: Life) -> None:
    """It was not read while a job had no place."""
    await life.one_pass()
    for kind, name in [name for name in life.server.objects if name[0] in kinds.ROLE_OF_PODS]:
        life.server.remove(kind, name)
    pod = learner_pod()
    ending = {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-01-02T03:04:05Z"}}
    life.store.put("Pod", {**ending, "status": {**pod["status"], "phase": "Failed"}})
    unplaced = {"type": reasons.PLACED, "status": "False", "reason": "r", "lastTransitionTime": "2026-01-02T03:04:05Z"}
    there = life.server.objects[names.KIND, KEY.name]
    life.server.add({**there, "status": {**there["status"], "conditions": [{**unplaced, "message": "m"}]}})
    await life.one_pass()
    assert DEPLOYMENT in life.server.objects


@pytest.mark.parametrize("kind", ["Job", "Deployment"])
async def test_unlabelled_child_is_found_through_its_pods(life: Life, kind: str) -> None:
    """A learner that trained was said to end, because the watch had its Job no more."""
    await life.one_pass()
    role = {"Job": names.ROLE_LEARNER, "Deployment": names.ROLE_ROLLOUT}[kind]
    pods = {names.ROLE_LEARNER: learner_pod(), names.ROLE_ROLLOUT: b.rollout_pod(True, True, True)}
    own = learner_pod()["metadata"]["annotations"]
    for pod in pods.values():
        life.store.put("Pod", {**pod, "metadata": {**pod["metadata"], "annotations": own, "resourceVersion": "9"}})
    await life.one_pass()
    before = {name: body for name, body in life.server.objects.items() if name[0] == kind}
    life.store.remove(kind, next(iter(before.values())))  # as a watch by the label reports it
    life.server.requests.clear()
    await life.one_pass()
    assert {name: body for name, body in life.server.objects.items() if name[0] == kind} == before
    assert not [request for request in life.server.requests if request[0] in ("delete", "create")]
    status = life.server.objects[names.KIND, KEY.name]["status"]
    running = conditions.find(status, reasons.LEARNER_RUNNING) or {}
    assert (running["status"], running["reason"]) == ("True", reasons.LEARNER_STARTED), role


async def test_refused_deletion_is_reported(life: Life) -> None:
    await life.one_pass()
    life.server.refused["Deployment"] = "the controller may not delete"
    life.server.add(b.job(suspend=True), generation=2)
    with pytest.raises(RetryLater, match="the controller may not delete"):
        await life.one_pass()
    assert life.children_applied() == ("False", reasons.CHILD_REFUSED)


@pytest.mark.parametrize("kind", ["ConfigMap", "Secret", "Service", "Deployment", "NetworkPolicy", "Job"])
async def test_foreign_object_with_childs_name_is_kept_and_reported_once(life: Life, kind: str) -> None:
    child = foreign(kind)
    theirs = life.server.add(child)
    assert await life.one_pass() == 0
    assert await life.one_pass() == 15
    assert await life.one_pass() == 15
    assert life.children_applied() == ("False", reasons.NAME_TAKEN)
    assert life.server.objects[kind, child["metadata"]["name"]] == theirs
    assert [key for key in life.server.objects if key[0] in kinds.ROLE_OF_PODS and key[0] != kind] == []
    assert life.server.events == [reasons.NAME_TAKEN]
    life.server.remove(kind, child["metadata"]["name"])
    await life.one_pass()
    assert life.children_applied() == ("True", reasons.APPLIED)
    assert DEPLOYMENT in life.server.objects


async def test_recreated_job_waits_until_old_config_and_secret_are_gone(life: Life) -> None:
    await life.one_pass()
    life.server.add(b.job(), uid="uid-of-the-next")
    life.reconciler.forget(KEY)  # the watch reported of the deletion
    for kind in ("Deployment", "Service", "NetworkPolicy", "Job"):  # the garbage collector was there
        (name,) = [name for there, name in life.server.objects if there == kind]
        life.server.remove(kind, name)
    files = life.server.objects[CONFIG], life.server.objects[TOKEN]
    assert await life.one_pass() == 0
    assert await life.one_pass() == 2
    assert life.children_applied() == ("False", reasons.OLD_CHILDREN_ENDING)
    assert (life.server.objects[CONFIG], life.server.objects[TOKEN]) == files
    assert DEPLOYMENT not in life.server.objects
    life.server.remove(*CONFIG)
    life.server.remove(*TOKEN)
    await life.one_pass()
    owner = life.server.objects[CONFIG]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == "uid-of-the-next"


async def test_own_secret_missing_from_cache_is_adopted_unchanged(life: Life) -> None:
    mine = life.server.add(b.child(b.planned(b.job()), "Secret"))
    await life.one_pass()
    assert life.children_applied() == ("True", reasons.APPLIED)
    assert life.server.objects[TOKEN] == mine


@pytest.mark.parametrize("kind", ["ConfigMap", "NetworkPolicy", "Service", "Deployment"])
async def test_own_child_missing_from_store_is_updated_in_place(life: Life, kind: str) -> None:
    (name,) = [child["metadata"]["name"] for child in b.planned(b.job()).children if child["kind"] == kind]
    changed = copy.deepcopy(b.child(b.planned(b.job()), kind))
    changed["metadata"]["annotations"] = {**changed["metadata"]["annotations"], "of": "an earlier version"}
    mine = life.server.put(changed)  # no watch tells of it
    await life.one_pass()
    there = life.server.objects[kind, name]
    assert there["metadata"]["uid"] == mine["metadata"]["uid"]
    assert "of" not in there["metadata"]["annotations"]
    assert life.children_applied() == ("True", reasons.APPLIED)


async def test_no_servers_are_created_when_learner_name_is_taken(life: Life) -> None:
    theirs = life.server.add(foreign("Job"))
    for _ in range(2):
        await life.one_pass()
        assert DEPLOYMENT not in life.server.objects
    assert life.server.objects["Job", "job-3v1-learner"] == theirs


async def test_waiting_learner_is_deleted_when_server_name_is_taken(life: Life) -> None:
    theirs = life.server.add(foreign("Deployment"))
    await life.one_pass()
    assert ("Job", "job-3v1-learner") in life.server.objects
    await life.one_pass()
    assert ("Job", "job-3v1-learner") not in life.server.objects
    assert life.server.objects["Deployment", "job-3v1-rollout"] == theirs


async def test_servers_of_running_learner_stay_when_service_name_is_taken(life: Life) -> None:
    await life.one_pass()
    life.store.put("Pod", learner_pod())
    life.server.remove("Service", "job-3v1-rollout")
    life.server.add(foreign("Service"))
    assert await life.one_pass() == 0
    await life.one_pass()
    assert life.children_applied() == ("False", reasons.NAME_TAKEN)
    assert DEPLOYMENT in life.server.objects


async def test_secret_without_certificates_is_recreated_before_pods(life: Life) -> None:
    life.server.add(manifest.secret(b.owner(b.job()), {"token": "of-before"}))
    for _ in range(4):
        await life.one_pass()
    kept = life.server.objects[TOKEN]["data"]
    assert {"ca.crt", "rollout.key", "learner.key"} <= set(kept)
    assert life.server.requests.count(("delete", "Secret")) == 1
    assert ("Job", "job-3v1-learner") in life.server.objects
    life.server.requests.clear()
    await life.one_pass()
    assert life.server.requests == []


async def test_new_leader_keeps_existing_certificates(life: Life) -> None:
    await life.one_pass()
    kept = life.server.objects[TOKEN]
    store = Store()
    for body in life.server.objects.values():
        store.put(body["kind"], body) if body["kind"] in WATCHED else None
    await reconciler(life.server, store)(KEY)
    assert life.server.objects[TOKEN] is kept


def ended(phase: str, reason: str) -> Object:
    """A job whose time to live has passed."""
    done = {"type": phase, "status": "True", "reason": reason, "message": "done"}
    at = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    raw = b.job(ttlSecondsAfterFinished=1)
    hashed = b.planned(raw).status["specHash"]
    status = {"phase": phase, "completionTime": at["lastTransitionTime"], "conditions": [{**done, **at}]}
    return {**raw, "status": {**status, "specHash": hashed, "observedGeneration": 1}}


async def test_expired_job_is_deleted_in_pass_that_reports_its_end(life: Life) -> None:
    life.server.add(ended(reasons.SUCCEEDED, reasons.LEARNER_SUCCEEDED))
    assert await life.one_pass() is None
    assert ("apply", "status") in life.server.requests
    assert (names.KIND, KEY.name) not in life.server.objects


async def test_job_end_is_reported_even_if_workload_update_fails(life: Life) -> None:
    done = ended(reasons.SUCCEEDED, reasons.LEARNER_SUCCEEDED)
    done["metadata"]["labels"] = {kueue.QUEUE_LABEL: "team"}
    life.server.add({**done, "status": {}})
    await life.one_pass()
    life.server.add(done)
    life.server.refused["status of Workload"] = "the controller may not write it"
    with pytest.raises(RetryLater, match="may not write it"):
        await life.one_pass()
    assert life.server.objects[names.KIND, KEY.name]["status"]["message"] == "done"
    life.server.refused.clear()
    life.server.requests.clear()
    await life.one_pass()
    assert life.server.requests == [("patch", "status of Workload"), ("delete", names.KIND)]


async def test_recreated_job_is_not_deleted_by_ttl_of_old_one(life: Life) -> None:
    old = life.server.add(ended(reasons.SUCCEEDED, reasons.LEARNER_SUCCEEDED))
    life.store.put(names.KIND, old)
    life.server.add(b.job(), uid="uid-of-the-next", resourceVersion="1")  # the watch has not reported of it yet
    await life.reconciler(KEY)
    assert ("delete", names.KIND) in life.server.requests
    assert (names.KIND, KEY.name) in life.server.objects


@pytest.mark.parametrize("reported_before", [False, True])
async def test_job_corrected_as_ttl_expires_is_not_deleted(life: Life, reported_before: bool) -> None:
    failed = life.server.add(ended(reasons.FAILED, reasons.CONFIGURATION_ERROR))
    if reported_before:  # a pass has written the status, and its deletion was refused
        life.server.refused[names.KIND] = "not now"
        with pytest.raises(RetryLater):
            await life.one_pass()
        life.server.refused.clear()
        failed = life.server.objects[names.KIND, KEY.name]
    life.server.unseen.clear()
    life.store.put(names.KIND, failed)
    life.server.put({**failed, "spec": {**failed["spec"], "image": "corrected:1"}}, generation=2)  # no watch reports it
    await life.reconciler(KEY)
    assert (names.KIND, KEY.name) in life.server.objects
    life.server.add(life.server.objects[names.KIND, KEY.name])
    await life.one_pass()
    assert DEPLOYMENT in life.server.objects


@pytest.mark.parametrize("kind", ["Secret", "ConfigMap", "NetworkPolicy", "Service", "Job"])
async def test_no_server_is_created_when_other_child_is_refused(life: Life, kind: str) -> None:
    life.server.refused[kind] = f"{kind.lower()}s are forbidden: exceeded quota: small"
    with pytest.raises(RetryLater, match="exceeded quota"):
        await life.one_pass()
    assert DEPLOYMENT not in life.server.objects
    assert {"ConfigMap", "NetworkPolicy", "Service", "Secret", kind} == set(life.server.written())
    assert life.children_applied() == ("False", reasons.CHILD_REFUSED)
    status = life.server.objects[names.KIND, KEY.name]["status"]
    for condition in (reasons.CHILDREN_APPLIED, reasons.TRAINING):
        assert "exceeded quota: small" in (conditions.find(status, condition) or {})["message"]
    assert "exceeded quota: small" in status["message"]

    life.server.refused.clear()
    await life.one_pass()
    assert DEPLOYMENT in life.server.objects
    assert life.children_applied() == ("True", reasons.APPLIED)


async def test_webhook_failure_counts_as_refusal_but_api_server_failure_does_not(life: Life) -> None:
    life.server.refused_with = 500
    life.server.refused["ConfigMap"] = "etcdserver: leader changed"
    with pytest.raises(RetryLater, match="leader changed"):
        await life.one_pass()
    assert "status" not in life.server.objects[names.KIND, KEY.name]
    life.server.refused["ConfigMap"] = 'Internal error occurred: failed calling webhook "policy.example": no answer'
    with pytest.raises(RetryLater, match="failed calling webhook"):
        await life.one_pass()
    assert life.children_applied() == ("False", reasons.CHILD_REFUSED)
