"""Passes over one job on an API server that is a dictionary: whose objects are read, written and deleted."""

import copy
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from stage2_api.job_status import JobStatus
from stage2_controller import conditions, reasons
from stage2_controller.children import manifest
from stage2_controller.cluster.api_server import ApiRefused
from stage2_controller.cluster.progress import ProgressPolls, ProgressReader
from stage2_controller.metrics import Metrics
from stage2_controller.reconcile import Reconciler
from stage2_controller.spec import kinds, names
from stage2_controller.spec.names import Key
from stage2_controller.store import Store
from stage2_controller.work_queue import RetryLater
from tests.unit.controller import builders as b

KEY = Key("team-a", "job-3v1")
CONFIG = ("ConfigMap", "job-3v1-config")
WATCHED = [resource.kind for resource in kinds.watched(kueue=False)]
Object = dict[str, Any]


@dataclass
class Server:
    """Objects by kind and name, and every request that was made."""

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    untold: list[tuple[str, Object]] = field(default_factory=list)  # what others changed: the watch's next events
    versions: Iterator[int] = field(default_factory=lambda: count(2))
    refused: dict[str, str] = field(default_factory=dict)  # by kind, with the API server's sentence
    refused_with: int = 403
    goes_when_asked: tuple[str, str] | None = None  # what somebody deletes just then

    def add(self, manifest: Any, **metadata: Any) -> Object:
        """Make the object exist, as anybody but the controller would."""
        made = self.put(manifest, **metadata)
        self.untold.append(("MODIFIED", made))
        return made

    def remove(self, kind: str, name: str) -> None:
        """Delete the object, as anybody but the controller would."""
        self.untold.append(("DELETED", self.objects.pop((kind, name))))

    def put(self, manifest: Any, **metadata: Any) -> Object:
        """Make the object exist. Of what the controller writes, no watch tells before a test ends."""
        made = copy.deepcopy(dict(manifest))
        version = str(next(self.versions))
        made["metadata"] = {"uid": f"uid-{version}", **made["metadata"], "resourceVersion": version, **metadata}
        self.objects[made["kind"], made["metadata"]["name"]] = made
        return made

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        self.requests.append(("get", kind))
        if self.goes_when_asked == (kind, name):
            self.objects.pop((kind, name), None)
        return self.objects.get((kind, name))

    async def apply(self, manifest: Any) -> Object:
        self._ask("apply", manifest["kind"])
        return self.put(manifest)

    async def hold_by_apply(self, kind: str, namespace: str, name: str) -> None:
        self.requests.append(("hold", kind))

    def _ask(self, verb: str, kind: str) -> None:
        self.requests.append((verb, kind))
        if kind in self.refused:
            answer = {
                "status": self.refused_with,
                "reason": "Forbidden",
                "body": json.dumps({"message": self.refused[kind]}),
            }
            error: Any = SimpleNamespace(**answer)
            raise ApiRefused(f"{verb} {kind}", error)

    async def create(self, manifest: Any) -> Object | None:
        self._ask("create", manifest["kind"])
        exists = (manifest["kind"], manifest["metadata"]["name"]) in self.objects
        return None if exists else self.put(manifest)

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str) -> None:
        self._ask("delete", kind)
        if self.objects[kind, name]["metadata"]["uid"] == uid:
            del self.objects[kind, name]

    async def delete_as_read(self, kind: str, body: Any) -> bool:
        self._ask("delete", kind)
        there = self.objects.get((kind, body["metadata"]["name"]))
        same = there and all(there["metadata"][key] == body["metadata"][key] for key in ("uid", "resourceVersion"))
        if same:
            del self.objects[kind, body["metadata"]["name"]]
        return bool(same or there is None)

    async def apply_status(self, job: Any, status: Any) -> Object | None:
        self.requests.append(("apply", "status"))
        there = self.objects[job["kind"], job["metadata"]["name"]]
        if there["metadata"]["uid"] != job["metadata"]["uid"]:
            return None
        JobStatus.model_validate(status)  # the definition's bounds: the API server would refuse more
        return self.put({**there, "status": status})

    async def emit(self, job: Any, event: Any, *, at: str) -> None:
        self.events.append(event.reason)

    def written(self) -> list[str]:
        """The kinds of the children that were written."""
        return [kind for verb, kind in self.requests if verb in ("apply", "create") and kind != "status"]


@dataclass
class Life:
    """A job on that server, and the controller's passes over it."""

    server: Server
    store: Store
    reconciler: Reconciler

    async def one_pass(self) -> float | None:
        """Make a pass that knows what the watches have told of others, and of its own writes what it remembers."""
        for change, body in self.server.untold:
            labelled = names.LABEL_MANAGED_BY in body["metadata"].get("labels", {})
            if body["kind"] in WATCHED and (labelled or body["kind"] == names.KIND):
                (self.store.remove if change == "DELETED" else self.store.put)(body["kind"], body)
        self.server.untold.clear()
        return await self.reconciler(KEY)

    def told(self) -> tuple[str, str] | None:
        """The condition ChildrenApplied."""
        status = self.server.objects[names.KIND, KEY.name].get("status") or {}
        found = conditions.find(status, reasons.CHILDREN_APPLIED)
        return (found["status"], found["reason"]) if found else None


@pytest.fixture
async def life() -> AsyncIterator[Life]:
    server, store = Server(), Store()
    progress = ProgressPolls(ProgressReader(), lambda key: None, interval_s=b.SETTINGS.progress_s)
    api: Any = server
    reconciler = Reconciler(
        api, store, progress, b.SETTINGS, metrics=Metrics(lambda: store.known(names.KIND)), clock=lambda: b.NOW
    )
    server.add(b.job())
    yield Life(server, store, reconciler)
    await progress.close()


def foreign(kind: str) -> Object:
    child = copy.deepcopy(b.child(b.planned(b.job()), kind))
    del child["metadata"]["ownerReferences"], child["metadata"]["labels"]
    return child


async def test_a_new_job_is_one_creation_a_child_and_one_status(life: Life) -> None:
    await life.one_pass()
    assert [verb for verb, _ in life.server.requests] == [*["create"] * 6, "apply"]
    assert life.server.requests[-1] == ("apply", "status")
    assert life.server.written()[:6] == ["Secret", "ConfigMap", "NetworkPolicy", "Service", "Job", "Deployment"]
    life.server.requests.clear()
    await life.one_pass()
    assert life.server.requests == []


async def test_what_a_pass_wrote_is_known_before_the_watches_tell_of_it(life: Life) -> None:
    await life.one_pass()
    written = {kind for kind, _ in life.server.objects if kind != names.KIND} - {"Secret", "ConfigMap"}
    assert {kind for kind in WATCHED if kind != names.KIND and list(life.store.known(kind))} == written
    assert life.store.one(names.KIND, KEY, KEY.name) == life.server.objects[names.KIND, KEY.name]


async def test_what_a_pass_deleted_is_gone_before_the_watches_tell_of_it(life: Life) -> None:
    await life.one_pass()
    life.server.add(b.job(suspend=True), generation=2)
    await life.one_pass()
    assert ("delete", "Deployment") in life.server.requests
    life.server.requests.clear()
    await life.one_pass()
    assert life.server.requests == []


async def test_a_secret_that_a_person_deletes_while_the_job_is_suspended_is_made_anew_at_once(life: Life) -> None:
    await life.one_pass()
    life.server.add(b.job(suspend=True), generation=2)
    await life.one_pass()
    life.server.remove("Secret", "job-3v1-token")
    life.server.add(b.job(), generation=3)
    await life.one_pass()
    assert ("Secret", "job-3v1-token") in life.server.objects


async def test_a_deletion_that_is_refused_is_told(life: Life) -> None:
    await life.one_pass()
    life.server.refused["Deployment"] = "the controller may not delete"
    life.server.add(b.job(suspend=True), generation=2)
    with pytest.raises(RetryLater, match="the controller may not delete"):
        await life.one_pass()
    assert life.told() == ("False", reasons.CHILD_REFUSED)


@pytest.mark.parametrize("kind", ["ConfigMap", "Secret", "Service", "Deployment", "NetworkPolicy", "Job"])
async def test_a_foreign_object_of_a_childs_name_stays_as_it_is_and_is_told_once(life: Life, kind: str) -> None:
    made = b.planned(b.job(), b.started(b.job(), secret=None))
    child = copy.deepcopy(b.child(made, kind))
    del child["metadata"]["ownerReferences"], child["metadata"]["labels"]
    theirs = life.server.add(child)
    assert await life.one_pass() == 0
    assert await life.one_pass() == 15
    assert await life.one_pass() == 15
    assert life.told() == ("False", reasons.NAME_TAKEN)
    assert life.server.objects[kind, child["metadata"]["name"]] == theirs
    assert [key for key in life.server.objects if key[0] in kinds.ROLE_OF_PODS and key[0] != kind] == []
    assert life.server.events == [reasons.NAME_TAKEN]
    life.server.remove(kind, child["metadata"]["name"])
    await life.one_pass()
    assert life.told() == ("True", reasons.APPLIED)
    assert ("Deployment", "job-3v1-rollout") in life.server.objects


async def test_a_job_that_is_applied_again_waits_for_the_files_of_the_one_before(life: Life) -> None:
    await life.one_pass()
    life.server.add(b.job(), uid="uid-of-the-next")
    life.reconciler.forget(KEY)  # the watch told of the deletion
    for kind in ("Deployment", "Service", "NetworkPolicy", "Job"):  # the garbage collector was there
        (name,) = [name for there, name in life.server.objects if there == kind]
        life.server.remove(kind, name)
    files = life.server.objects[CONFIG], life.server.objects["Secret", "job-3v1-token"]
    assert await life.one_pass() == 0
    assert await life.one_pass() == 2
    assert life.told() == ("False", reasons.OLD_CHILDREN_ENDING)
    assert (life.server.objects[CONFIG], life.server.objects["Secret", "job-3v1-token"]) == files
    assert ("Deployment", "job-3v1-rollout") not in life.server.objects
    life.server.remove(*CONFIG)
    life.server.remove("Secret", "job-3v1-token")
    await life.one_pass()
    owner = life.server.objects[CONFIG]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == "uid-of-the-next"


async def test_a_secret_of_its_own_that_the_pass_did_not_know_is_taken_as_it_is(life: Life) -> None:
    mine = life.server.add(b.child(b.planned(b.job()), "Secret"))
    await life.one_pass()
    assert life.told() == ("True", reasons.APPLIED)
    assert life.server.objects["Secret", "job-3v1-token"] == mine


@pytest.mark.parametrize("kind", ["ConfigMap", "NetworkPolicy", "Service", "Deployment"])
async def test_a_child_of_its_own_that_the_pass_did_not_know_is_made_what_it_should_be(life: Life, kind: str) -> None:
    (name,) = [child["metadata"]["name"] for child in b.planned(b.job()).children if child["kind"] == kind]
    changed = copy.deepcopy(b.child(b.planned(b.job()), kind))
    changed["metadata"]["annotations"] = {**changed["metadata"]["annotations"], "of": "an earlier version"}
    mine = life.server.put(changed)  # no watch tells of it
    await life.one_pass()
    there = life.server.objects[kind, name]
    assert there["metadata"]["uid"] == mine["metadata"]["uid"]
    assert "of" not in there["metadata"]["annotations"]
    assert life.told() == ("True", reasons.APPLIED)


async def test_a_creation_that_finds_a_name_taken_and_then_free_is_made_again_before_any_pod(life: Life) -> None:
    policy = ("NetworkPolicy", "job-3v1-pods")
    theirs = life.server.add(foreign("NetworkPolicy"))
    life.server.goes_when_asked = policy
    assert await life.one_pass() == 0
    assert theirs not in life.server.objects.values()
    assert not [key for key in life.server.objects if key[0] in kinds.ROLE_OF_PODS]
    await life.one_pass()
    assert policy in life.server.objects
    assert ("Deployment", "job-3v1-rollout") in life.server.objects


async def test_a_configmap_that_a_person_deletes_while_the_job_is_suspended_is_made_anew_at_once(life: Life) -> None:
    await life.one_pass()
    life.server.add(b.job(suspend=True), generation=2)
    await life.one_pass()
    life.server.remove(*CONFIG)
    life.server.add(b.job(), generation=3)
    await life.one_pass()
    assert CONFIG in life.server.objects


async def test_no_servers_are_made_when_the_learners_name_turns_out_to_be_taken(life: Life) -> None:
    theirs = life.server.add(foreign("Job"))
    for _ in range(2):
        await life.one_pass()
        assert ("Deployment", "job-3v1-rollout") not in life.server.objects
    assert life.server.objects["Job", "job-3v1-learner"] == theirs


async def test_a_learner_that_waits_goes_when_the_servers_name_turns_out_to_be_taken(life: Life) -> None:
    theirs = life.server.add(foreign("Deployment"))
    await life.one_pass()
    assert ("Job", "job-3v1-learner") in life.server.objects
    await life.one_pass()
    assert ("Job", "job-3v1-learner") not in life.server.objects
    assert life.server.objects["Deployment", "job-3v1-rollout"] == theirs


async def test_no_server_is_created_beside_a_learner_that_was_refused(life: Life) -> None:
    life.server.refused["Job"] = "exceeded quota: one, requested: count/jobs.batch=1"
    with pytest.raises(RetryLater, match=r"count/jobs\.batch"):
        await life.one_pass()
    assert ("Deployment", "job-3v1-rollout") not in life.server.objects
    assert life.told() == ("False", reasons.CHILD_REFUSED)


async def test_servers_stay_when_a_stranger_takes_the_name_of_a_file_of_a_learner_that_runs(life: Life) -> None:
    await life.one_pass()
    life.server.remove("Service", "job-3v1-rollout")
    life.server.add(foreign("Service"))
    assert await life.one_pass() == 0
    await life.one_pass()
    assert life.told() == ("False", reasons.NAME_TAKEN)
    assert ("Deployment", "job-3v1-rollout") in life.server.objects


async def test_a_secret_without_certificates_is_made_anew_before_any_pod(life: Life) -> None:
    life.server.add(manifest.secret(b.owner(b.job()), {"token": "of-before"}))
    for _ in range(4):
        await life.one_pass()
    kept = life.server.objects["Secret", "job-3v1-token"]["data"]
    assert {"ca.crt", "rollout.key", "learner.key"} <= set(kept)
    assert life.server.requests.count(("delete", "Secret")) == 1
    assert ("Job", "job-3v1-learner") in life.server.objects
    life.server.requests.clear()
    await life.one_pass()
    assert life.server.requests == []


async def test_a_controller_that_takes_over_leaves_the_certificates_as_they_are(life: Life) -> None:
    await life.one_pass()
    kept = life.server.objects["Secret", "job-3v1-token"]
    api: Any = life.server
    store = Store()
    for body in life.server.objects.values():
        store.put(body["kind"], body) if body["kind"] in WATCHED else None
    progress = ProgressPolls(ProgressReader(), lambda key: None, interval_s=b.SETTINGS.progress_s)
    metrics = Metrics(lambda: store.known(names.KIND))
    await Reconciler(api, store, progress, b.SETTINGS, metrics=metrics, clock=lambda: b.NOW)(KEY)
    await progress.close()
    assert life.server.objects["Secret", "job-3v1-token"] is kept


def ended(phase: str, reason: str) -> Object:
    """A job whose time to live has passed."""
    done = {"type": phase, "status": "True", "reason": reason, "message": "done"}
    at = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    raw = b.job(ttlSecondsAfterFinished=1)
    hashed = b.planned(raw).status["specHash"]
    status = {"phase": phase, "completionTime": at["lastTransitionTime"], "conditions": [{**done, **at}]}
    return {**raw, "status": {**status, "specHash": hashed, "observedGeneration": 1}}


async def test_a_job_whose_time_to_live_has_passed_is_deleted_in_the_pass_that_tells_of_its_end(life: Life) -> None:
    life.server.add(ended(reasons.SUCCEEDED, reasons.LEARNER_SUCCEEDED))
    assert await life.one_pass() is None
    assert ("apply", "status") in life.server.requests
    assert (names.KIND, KEY.name) not in life.server.objects


async def test_a_job_that_was_applied_again_while_its_time_to_live_passed_is_not_deleted(life: Life) -> None:
    old = life.server.add(ended(reasons.SUCCEEDED, reasons.LEARNER_SUCCEEDED))
    life.store.put(names.KIND, old)
    life.server.add(b.job(), uid="uid-of-the-next", resourceVersion="1")  # the watch has not told of it yet
    await life.reconciler(KEY)
    assert ("delete", names.KIND) in life.server.requests
    assert (names.KIND, KEY.name) in life.server.objects


@pytest.mark.parametrize("told_before", [False, True])
async def test_a_job_that_was_corrected_while_its_time_to_live_passed_is_not_deleted(
    life: Life, told_before: bool
) -> None:
    failed = life.server.add(ended(reasons.FAILED, reasons.CONFIGURATION_ERROR))
    if told_before:  # a pass has written the status, and its deletion was refused
        life.server.refused[names.KIND] = "not now"
        with pytest.raises(RetryLater):
            await life.one_pass()
        life.server.refused.clear()
        failed = life.server.objects[names.KIND, KEY.name]
    life.server.untold.clear()
    life.store.put(names.KIND, failed)
    life.server.put({**failed, "spec": {**failed["spec"], "image": "corrected:1"}}, generation=2)  # no watch has told
    assert await life.reconciler(KEY) == 1
    assert (names.KIND, KEY.name) in life.server.objects
    life.server.add(life.server.objects[names.KIND, KEY.name])
    await life.one_pass()
    assert ("Deployment", "job-3v1-rollout") in life.server.objects


@pytest.mark.parametrize("kind", ["Secret", "ConfigMap", "NetworkPolicy", "Service"])
async def test_no_server_is_created_beside_a_prerequisite_that_was_refused(life: Life, kind: str) -> None:
    life.server.refused[kind] = f"{kind.lower()}s are forbidden: exceeded quota: small"
    with pytest.raises(RetryLater, match="exceeded quota"):
        await life.one_pass()
    assert ("Deployment", "job-3v1-rollout") not in life.server.objects
    assert {"ConfigMap", "NetworkPolicy", "Service", "Secret"} == set(life.server.written())
    assert life.told() == ("False", reasons.CHILD_REFUSED)
    status = life.server.objects[names.KIND, KEY.name]["status"]
    for condition in (reasons.CHILDREN_APPLIED, reasons.TRAINING):
        assert "exceeded quota: small" in (conditions.find(status, condition) or {})["message"]
    assert "exceeded quota: small" in status["message"]

    life.server.refused.clear()
    await life.one_pass()
    assert ("Deployment", "job-3v1-rollout") in life.server.objects
    assert life.told() == ("True", reasons.APPLIED)


async def test_a_webhook_that_fails_is_a_refusal_and_an_api_server_that_fails_is_none(life: Life) -> None:
    life.server.refused_with = 500
    life.server.refused["ConfigMap"] = "etcdserver: leader changed"
    with pytest.raises(RetryLater, match="leader changed"):
        await life.one_pass()
    assert "status" not in life.server.objects[names.KIND, KEY.name]
    life.server.refused["ConfigMap"] = 'Internal error occurred: failed calling webhook "policy.example": no answer'
    with pytest.raises(RetryLater, match="failed calling webhook"):
        await life.one_pass()
    assert life.told() == ("False", reasons.CHILD_REFUSED)


async def test_the_same_refusal_writes_no_status_twice(life: Life) -> None:
    life.server.refused["Service"] = "no"
    for _ in range(2):
        life.server.requests.clear()
        with pytest.raises(RetryLater):
            await life.one_pass()
    assert ("apply", "status") not in life.server.requests
