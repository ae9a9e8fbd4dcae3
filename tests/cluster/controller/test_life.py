"""A job's life on a real API server: children appear, the learner follows its servers, the end releases them."""

import functools
import json

from stage2_controller.job import kinds, names
from tests.cluster.controller.conftest import Controller, Kubectl, Kubelet, eventually, job, phase, reason
from tests.cluster.controller.test_placement import message

NETWORK_POLICIES = "count/networkpolicies.networking.k8s.io"


def test_job_goes_from_pending_to_succeeded(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    kubectl.apply(job())
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout"), why="the Deployment exists")
    eventually(lambda: phase(kubectl, "job-3v1") == "Starting", why="its servers have a node")
    kubelet.learner_waits("job-3v1")
    eventually(lambda: reason(kubectl, "job-3v1", "LearnerRunning") == "WaitingForServers", why="the learner waits")

    kubelet.servers_answer("job-3v1")
    eventually(lambda: reason(kubectl, "job-3v1", "RolloutReady") == "ServersReady", why="the status says so")

    kubelet.learner_runs("job-3v1")
    eventually(lambda: phase(kubectl, "job-3v1") == "Running", why="the job runs")

    kubelet.learner_ends("job-3v1", 0, '{"step": 10, "maxSteps": 10, "phase": "done"}')
    kubectl("wait", "--for=condition=Succeeded", "rmj/job-3v1", "--timeout=600s")
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout") is None, why="the servers are released")
    assert kubectl("get", "rmj", "job-3v1", "--no-headers").split()[:4] == ["job-3v1", "Succeeded", "10/10", "0/3"]
    told = {"ServersReady", "LearnerStarted", "LearnerSucceeded"}
    eventually(lambda: told <= {one["reason"] for one in kubectl.list("events")}, why="events follow the status")


def test_configuration_error_is_not_retried(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    kubectl.apply(job())
    kubelet.servers_answer("job-3v1")
    kubelet.learner_runs("job-3v1")
    kubelet.learner_ends("job-3v1", 64, "custom.train_jsonl: '/data/x'; must exist; mount the volume that holds it")
    kubectl("wait", "--for=condition=Failed", "rmj/job-3v1", "--timeout=600s")
    assert reason(kubectl, "job-3v1", "Failed") == "ConfigurationError"
    assert "must exist" in (kubectl.get("rmj", "job-3v1") or {})["status"]["message"]


def test_deleting_job_deletes_all_its_children(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    children = [
        child for child in kinds.CHILDREN if child not in (kinds.WORKLOAD, kinds.JOBSET)
    ]  # of one node, unqueued
    owned = {one.kind: one.plural for one in (*children, kinds.POD)}

    def there() -> set[str]:
        """The kinds of which anything is there."""
        found = kubectl.list(*owned.values(), selector=f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}")
        return {one["kind"] for one in found}

    kubectl.apply(job())
    kubelet.servers_answer("job-3v1")
    eventually(lambda: there() == set(owned), why="all children exist")
    kubectl("delete", "rmj", "job-3v1", "--timeout=600s")
    eventually(lambda: not there(), why="no child is left")


def test_failed_job_that_is_deleted_and_applied_again_runs(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    def hold(*finalizers: str) -> None:
        """Keeps the old learner Job from going, as a slow garbage collector would; none: lets it go."""
        patch = json.dumps({"metadata": {"finalizers": list(finalizers)}})
        kubectl("patch", "job", "job-3v1-learner", "--type=merge", "-p", patch)

    kubectl.apply(job())
    kubelet.servers_answer("job-3v1")
    kubelet.learner_runs("job-3v1")
    kubelet.learner_ends("job-3v1", 64, "custom.train_jsonl: '/data/x'; must exist; mount the volume that holds it")
    kubectl("wait", "--for=condition=Failed", "rmj/job-3v1", "--timeout=600s")
    hold("stage2.dev/of-a-test")
    kubectl("delete", "rmj", "job-3v1", "--timeout=600s")
    kubectl.apply(job(image="corrected:1"))
    waits = "OldChildrenEnding"
    eventually(lambda: reason(kubectl, "job-3v1", "ChildrenApplied") == waits, why="it waits for the old learner's end")
    assert phase(kubectl, "job-3v1") == "Pending"
    hold()
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout"), why="its own servers exist")
    kubelet.job_runs("job-3v1")


def test_job_waits_until_foreign_object_with_childs_name_is_gone(kubectl: Kubectl, controller: Controller) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "job-3v1-config"}, "data": {"a": "b"}}
    kubectl.apply(theirs)
    before = kubectl.get("configmap", "job-3v1-config")
    kubectl.apply(job())
    eventually(lambda: reason(kubectl, "job-3v1", "ChildrenApplied") == "NameTaken", why="the job says so")
    message = (kubectl.get("rmj", "job-3v1") or {})["status"]["message"]
    assert message == "ConfigMap job-3v1-config exists and is not this job's; rename the job or the object"
    assert kubectl.get("configmap", "job-3v1-config") == before
    assert not kubectl.list("deployments", "jobs", "pods")
    kubectl("delete", "configmap", "job-3v1-config")
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout"), why="the job begins")
    eventually(lambda: reason(kubectl, "job-3v1", "ChildrenApplied") == "Applied", why="the status says so")


def test_resumed_job_recreates_same_learner(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    def step() -> int | None:
        found: int | None = (kubectl.get("rmj", "job-3v1") or {})["status"].get("step")
        return found

    def learner() -> tuple[str, object]:
        """Identity of the Job, and what its container runs with: the checkpoints lie in its output folder."""
        found = eventually(lambda: kubectl.get("job", "job-3v1-learner"), why="the learner exists")
        config = (kubectl.get("configmap", "job-3v1-config") or {})["data"]
        return found["metadata"]["uid"], (found["spec"]["template"]["spec"]["containers"], config)

    kubectl.apply(job())
    kubelet.servers_answer("job-3v1")
    kubelet.learner_runs("job-3v1", report='{"step": 4, "maxSteps": 10, "phase": "training"}')
    eventually(lambda: phase(kubectl, "job-3v1") == "Running", why="the job runs")
    eventually(lambda: step() == 4, why="its progress is reported")
    uid, first = learner()
    kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    eventually(lambda: not kubectl.list("deployments", "jobs", "pods"), why="no pod is left")
    eventually(lambda: phase(kubectl, "job-3v1") == "Suspended", why="the phase says so")
    kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout"), why="the servers are back")
    kubelet.job_runs("job-3v1")
    resumed_uid, resumed = learner()
    assert resumed == first
    assert resumed_uid != uid
    assert step() is None, "a learner that loads has done nothing"
    kubelet.learner_runs("job-3v1", report='{"step": 5, "maxSteps": 10, "phase": "training"}')
    eventually(lambda: step() == 5, why="the progress of the new learner is reported")


def test_servers_that_never_answer_fail_job_at_start_deadline(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(job(learner={"gpus": 1, "startDeadlineSeconds": 5}))  # by the clock: no server answers
    kubelet.servers_answer("job-3v1", ready=False)
    kubectl("wait", "--for=condition=Failed", "rmj/job-3v1", "--timeout=600s")
    assert reason(kubectl, "job-3v1", "Failed") == "StartDeadlineExceeded"
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout") is None, why="its GPUs are free")


def test_deleted_or_changed_child_is_restored(kubectl: Kubectl, controller: Controller) -> None:
    kubectl.apply(job())
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout"), why="the Deployment exists")
    kubectl("delete", "service", "job-3v1-rollout")
    eventually(lambda: kubectl.get("service", "job-3v1-rollout"), why="the Service is back")
    kubectl("scale", "deployment", "job-3v1-rollout", "--replicas=0")

    def replicas() -> int:
        return int((kubectl.get("deployment", "job-3v1-rollout") or {})["spec"]["replicas"])

    eventually(lambda: replicas() == 1, why="the Deployment is mended")


def test_no_pods_are_created_beside_refused_child(kubectl: Kubectl, controller: Controller) -> None:
    for kind, counted in (("service", "services"), ("secret", "secrets"), ("networkpolicy", NETWORK_POLICIES)):
        body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
        kubectl.apply({**body, "spec": {"hard": {counted: "0"}}})
        eventually(lambda: (kubectl.get("quota", "none") or {}).get("status", {}).get("hard"), why="the quota counts")
        name, mine = f"no-{kind}", f"stage2.dev/job=no-{kind}"
        kubectl.apply(job(name))
        reported = functools.partial(reason, kubectl, name, "ChildrenApplied")
        eventually(lambda reported=reported: reported() == "ChildRefused", why=f"the refusal of the {kind} is reported")
        assert "exceeded quota: none" in message(kubectl, name)
        assert not kubectl.list("deployments", "jobs", "pods", selector=mine), f"without its {kind}"
        kubectl("delete", "quota", "none")
        eventually(lambda reported=reported: reported() == "Applied", why="the status says so once nothing is refused")
        eventually(lambda mine=mine: len(kubectl.list("deployments", "jobs", selector=mine)) == 2, why="it has pods")


def test_field_removed_by_edit_is_removed_from_child(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    body = job()
    body["spec"]["network"] = {"egress": "Closed"}
    kubectl.apply(body)
    policy = eventually(lambda: kubectl.get("networkpolicy", "job-3v1-pods"), why="the NetworkPolicy exists")
    assert policy["spec"]["egress"]
    kubectl("annotate", "networkpolicy", "job-3v1-pods", "of=somebody-else")
    for egress in ("Open", "Closed", "Open"):  # the first apply takes the fields over, the others find them so
        kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", json.dumps({"spec": {"network": {"egress": egress}}}))
        wanted = egress == "Closed"
        eventually(
            lambda wanted=wanted: ("egress" in kubectl.get("networkpolicy", "job-3v1-pods")["spec"]) is wanted,
            why=f"the policy follows {egress}",
        )
    left = kubectl.get("networkpolicy", "job-3v1-pods")
    assert left["metadata"]["uid"] == policy["metadata"]["uid"]
    assert left["metadata"]["annotations"]["of"] == "somebody-else"
    managers = [(entry["manager"], entry["operation"]) for entry in left["metadata"]["managedFields"]]
    assert [entry for entry in managers if entry[0] == "stage2-controller"] == [("stage2-controller", "Apply")]
