"""Behind a job's Service stand its own rollout pods: what a stranger's pod wears, names or claims brings it nothing."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.children import comparison
from stage2_controller.children.comparison import owned
from stage2_controller.children.manifest import labels
from stage2_controller.children.network import slices_to_write
from stage2_controller.observed import Observed
from stage2_controller.spec import names
from tests.unit.controller import builders as b

Object = dict[str, Any]
SERVERS = "job-3v1-rollout-7d9c-x"
OURS = "10.0.0.7"


def controlled_by(body: Object, kind: str, uid: str) -> Object:
    reference = {"apiVersion": "apps/v1", "kind": kind, "name": "owner", "uid": uid, "controller": True}
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [reference]}}


def replica_set(uid: str, *, deployment: str) -> Object:
    return controlled_by({"metadata": {"name": uid, "namespace": "team-a", "uid": uid}}, "Deployment", deployment)


def server_pod(name: str = SERVERS, *, address: str = OURS, owner: str = "uid-of-set", **status: Any) -> Object:
    """A pod with everything that a stranger can copy: labels, annotations, the job's uid."""
    made = b.pod(names.ROLE_ROLLOUT, name=name, podIP=address, podIPs=[{"ip": address}], **status)
    made["metadata"] |= {"uid": f"uid-of-{name}", "annotations": copied()}
    return controlled_by(made, "ReplicaSet", owner)


def copied() -> dict[str, str]:
    return {names.ANNOTATION_JOB: "job-3v1", names.ANNOTATION_JOB_UID: b.job()["metadata"]["uid"]}


def observed(*pods: Object, slices: tuple[Object, ...] = (), **more: Any) -> Observed:
    """A job that runs, whose Service and Deployment the API server has taken."""
    made = b.started(b.job())
    assert made.service is not None
    assert made.deployment is not None
    service: Object = copy.deepcopy(dict(made.service))
    del service["spec"]["selector"]  # an empty one is not reported
    service["spec"]["ipFamilies"] = ["IPv4"]
    deployment = copy.deepcopy(dict(made.deployment))
    deployment["metadata"]["uid"] = "uid-of-deployment"
    sets = (replica_set("uid-of-set", deployment="uid-of-deployment"), replica_set("uid-of-theirs", deployment="other"))
    parts: Object = {"service": service, "deployment": deployment, "replicasets": sets, "pods": pods}
    return replace(made, **{**parts, "endpointslices": slices, **more})


def addresses(found: tuple[Object, ...]) -> dict[str, list[str]]:
    """The addresses of each slice, by its name."""
    return {
        one["metadata"]["name"]: [item for endpoint in one["endpoints"] for item in endpoint["addresses"]]
        for one in found
    }


def test_the_jobs_pod_stands_behind_its_service() -> None:
    (made,) = slices_to_write(observed(server_pod()))
    assert made["metadata"]["labels"]["kubernetes.io/service-name"] == "job-3v1-rollout"
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": SERVERS, "uid": f"uid-of-{SERVERS}"}
    ]
    assert made["ports"] == [{"name": f"server-{i}", "port": 8000 + i, "protocol": "TCP"} for i in range(3)]
    (endpoint,) = made["endpoints"]
    assert (endpoint["addresses"], endpoint["conditions"], endpoint["nodeName"]) == ([OURS], {"ready": True}, b.NODE)
    assert made["addressType"] == "IPv4"


STRANGER = server_pod("stranger", address="10.0.0.66")


THEIRS: dict[str, Object] = {
    "no owner": {**STRANGER, "metadata": {**STRANGER["metadata"], "ownerReferences": []}},
    "a ReplicaSet of their own": controlled_by(STRANGER, "ReplicaSet", "uid-of-theirs"),
    "one that is not there": controlled_by(STRANGER, "ReplicaSet", "uid-of-nobody"),
    "our Deployment itself": controlled_by(STRANGER, "Deployment", "uid-of-deployment"),
    "our job itself": controlled_by(STRANGER, names.KIND, b.job()["metadata"]["uid"]),
}


@pytest.mark.parametrize("theirs", THEIRS.values(), ids=THEIRS)
def test_a_pod_that_wears_all_labels_of_the_servers_is_not_behind_their_service(theirs: Object) -> None:
    raw = b.job()
    assert theirs["metadata"]["labels"] == labels("job-3v1", names.ROLE_ROLLOUT)
    seen = owned(observed(server_pod(), theirs), raw["metadata"])
    assert addresses(b.planned(raw, seen).slices) == {SERVERS: [OURS]}


def test_a_pod_that_nothing_controls_is_no_pod_of_the_job() -> None:
    seen = owned(observed(server_pod(), THEIRS["no owner"]), b.job()["metadata"])
    assert [pod["metadata"]["name"] for pod in seen.pods] == [SERVERS]
    assert seen.leaving == seen.foreign == ()


def test_what_is_written_already_is_not_written_again() -> None:
    (made,) = slices_to_write(observed(server_pod()))
    assert slices_to_write(observed(server_pod(), slices=(made,))) == ()


@pytest.mark.parametrize("ready", [True, False])
def test_a_pod_that_is_not_ready_stays_within_reach_it_waits_for_its_weights(ready: bool) -> None:
    pod = server_pod(conditions=[{"type": "Ready", "status": str(ready)}])
    (made,) = slices_to_write(observed(pod))
    assert made["endpoints"][0]["conditions"] == {"ready": True}
    assert slices_to_write(observed(server_pod(), slices=(made,))) == ()


CHANGES: dict[str, Object] = {
    "no address": {"endpoints": []},
    "none at all": {"endpoints": None},
    "no ports": {"ports": []},
    "of no Service": {"metadata": {"name": SERVERS, "labels": {}}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_somebody_has_changed_is_mended(change: Object) -> None:
    (made,) = slices_to_write(observed(server_pod()))
    assert slices_to_write(observed(server_pod(), slices=({**made, **change},))) == (made,)


def test_a_strangers_address_in_the_jobs_slice_is_taken_out() -> None:
    (made,) = slices_to_write(observed(server_pod()))
    widened = copy.deepcopy(made)
    widened["endpoints"].append({"addresses": ["10.0.0.66"]})
    assert slices_to_write(observed(server_pod(), slices=(widened,))) == (made,)


def test_a_pod_that_got_another_address_is_found_there() -> None:
    before = slices_to_write(observed(server_pod(address="10.0.0.8")))
    assert addresses(slices_to_write(observed(server_pod(), slices=before))) == {SERVERS: [OURS]}


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_the_address_of_a_pod_that_has_ended_is_taken_out(phase: str) -> None:
    before = slices_to_write(observed(server_pod()))
    assert addresses(slices_to_write(observed(server_pod(phase=phase), slices=before))) == {SERVERS: []}
    assert slices_to_write(observed(server_pod(phase=phase))) == ()


def test_a_pod_that_is_replaced_gives_its_place_to_the_next() -> None:
    before = slices_to_write(observed(server_pod()))
    leaving = server_pod()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-02T03:05:00Z"
    following = server_pod("job-3v1-rollout-7d9c-y", address="10.0.0.9")
    seen = observed(leaving, following, slices=before)
    assert addresses(slices_to_write(seen)) == {SERVERS: [], "job-3v1-rollout-7d9c-y": ["10.0.0.9"]}


def test_the_address_is_of_the_services_family() -> None:
    pod = server_pod()
    pod["status"]["podIPs"] = [{"ip": "10.0.0.7"}, {"ip": "fd00::7"}]
    seen = observed(pod)
    assert seen.service is not None
    service = {**seen.service, "spec": {**seen.service["spec"], "ipFamilies": ["IPv6"]}}
    (made,) = slices_to_write(replace(seen, service=service))
    assert (made["addressType"], made["endpoints"][0]["addresses"]) == ("IPv6", ["fd00::7"])


def without_address() -> Object:
    pod = server_pod()
    del pod["status"]["podIPs"]
    return pod


def going(manifest: Any) -> Object:
    return {**manifest, "metadata": {**manifest["metadata"], "deletionTimestamp": "2026-01-02T03:05:00Z"}}


def choosing(service: Any) -> Object:
    return {**service, "spec": {**service["spec"], "selector": labels("job-3v1", names.ROLE_ROLLOUT)}}


NO_ADDRESS_YET: dict[str, Observed] = {
    "no address yet": observed(without_address()),
    "no Service": observed(server_pod(), service=None),
    "no Deployment": observed(server_pod(), deployment=None),
    "a Deployment that goes": observed(server_pod(), deployment=going(observed().deployment)),
    "an owner that is not known yet": observed(server_pod(), replicasets=()),
    "a Service of an older controller": observed(server_pod(), service=choosing(observed().service)),
}


@pytest.mark.parametrize("seen", NO_ADDRESS_YET.values(), ids=NO_ADDRESS_YET)
def test_nothing_is_written(seen: Observed) -> None:
    assert slices_to_write(seen) == ()


def test_a_running_job_whose_spec_was_edited_into_a_wrong_one_keeps_its_servers() -> None:
    raw = b.with_status(b.job(), b.planned(b.job(), observed(server_pod())))
    raw["spec"]["rollout"]["servers"] = "many"
    made = b.planned(raw, observed(server_pod()))
    assert b.condition(made, "Accepted") == ("False", "InvalidSpec")
    assert addresses(made.slices) == {SERVERS: [OURS]}


def test_a_service_to_which_somebody_gave_a_choice_by_labels_is_recreated() -> None:
    made = b.planned(b.job(), observed(server_pod(), service=choosing(observed().service)))
    assert (made.deletions, made.again_after_s) == (("Service",), 0)
    assert "Service" not in b.kinds(made)
    again = b.planned(b.job(), observed(server_pod(), service=None))
    assert (again.deletions, b.child(again, "Service")["spec"]["selector"]) == ((), {})
    settled = b.planned(b.job(), observed(server_pod()))
    assert settled.deletions == ()


def test_the_service_of_an_older_controller_stays_while_pods_run() -> None:
    service = choosing(observed().service)
    service["metadata"] = {
        **service["metadata"],
        "annotations": {**service["metadata"]["annotations"], names.ANNOTATION_MANIFEST_HASH: "of-before"},
    }
    assert b.planned(b.job(), observed(server_pod(), service=service)).deletions == ()
    waiting = observed(service=service, learner=None, progress=None)
    assert b.planned(b.job(), waiting).deletions == ("Service",)


def test_what_is_sent_of_a_service_that_chooses_nobody_is_what_comes_back() -> None:
    seen = observed(server_pod())
    assert comparison.writes([b.child(b.planned(b.job(), seen), "Service")], seen) == []
