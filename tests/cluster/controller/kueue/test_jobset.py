"""Jobs with engine JobSet on the real JobSet and the real Kueue, by a controller with the chart's plain rights."""

import pytest

from tests.cluster.controller.conftest import (
    HERE,
    Controller,
    Kubectl,
    Kubelet,
    Object,
    eventually,
    job,
    phase,
    reason,
)
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.kueue.conftest import JOBSETS
from tests.cluster.controller.kueue.queues import QUEUE
from tests.cluster.controller.test_placement import SECURE

pytestmark = [pytest.mark.alone, pytest.mark.in_turns(4, apart=True)]


def wide(name: str, *, queued: bool = True) -> Object:
    """A job of two rollout pods and a learner, three GPUs in all."""
    placement = {"nodeSelector": HERE, "topologyKey": "kubernetes.io/hostname"}
    made = job(name, engine="JobSet", rollout={"servers": 2}, placement=placement)
    made["metadata"]["labels"] = {QUEUE: "team"} if queued else {}
    return made


def runs(kubectl: Kubectl, kubelet: Kubelet, name: str) -> None:
    """Play the pods of a job until it runs."""
    for index in (0, 1):
        kubelet.servers_answer(name, role=f"rollout,batch.kubernetes.io/job-completion-index={index}")
    kubelet.learner_runs(name)
    eventually(lambda: phase(kubectl, name) == "Running", why=f"{name} runs")


def learner(kubelet: Kubelet) -> str:
    """The name of the newest pod of the learner of `wrong`."""
    return str((kubelet.pod("wrong", "learner") or {})["metadata"]["name"])


def test_missing_jobset_is_reported_with_install_command(kubectl: Kubectl, plain: Controller) -> None:
    if kubectl.get("crd", JOBSETS) is not None:
        pytest.skip("this cluster has JobSet")
    kubectl.apply(wide("wide", queued=False))
    eventually(lambda: reason(kubectl, "wide", "ChildrenApplied") == "JobSetMissing", why="the job says so")
    assert "kubectl apply --server-side -f https://" in (kubectl.get("rmj", "wide") or {})["status"]["message"]


def test_kueue_admits_jobsets_in_turn_and_learner_result_ends_job(
    kubectl: Kubectl, team: list[str], jobset: None, plain: Controller, kubelet: Kubelet
) -> None:
    for name in ("first", "second"):
        kubectl.apply(wide(name))
        eventually(lambda name=name: reason(kubectl, name, "QuotaReserved"), why=f"Kueue knows {name}")
    runs(kubectl, kubelet, "first")
    assert reason(kubectl, "first", "QuotaReserved") == "Admitted"
    assert {one["metadata"]["ownerReferences"][0]["kind"] for one in kubectl.list("workloads")} == {"JobSet"}
    assert reason(kubectl, "second", "QuotaReserved") == "QuotaPending"
    assert kubelet.pod("second", "rollout") is None
    kubelet.learner_ends("first", 0)
    eventually(lambda: phase(kubectl, "first") == "Succeeded", why="the first ends")
    eventually(lambda: kubelet.pod("first", "rollout") is None, why="JobSet ends its servers")
    assert kubelet.pod("first", "learner") is not None, "its log stays"
    runs(kubectl, kubelet, "second")
    pods = kubectl.list("pods", selector="stage2.dev/job=second,stage2.dev/role=rollout")
    assert {one["spec"]["hostname"] for one in pods} == {f"second-jobset-rollout-0-{index}" for index in (0, 1)}
    kubectl("patch", "rmj", "second", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    eventually(lambda: reason(kubectl, "second", "Suspended") == "SuspendedBySpec", why="it is suspended")
    jobsets = lambda: [one["metadata"]["name"] for one in kubectl.list("jobsets")]  # noqa: E731
    eventually(lambda: jobsets() == ["first-jobset"], why="its JobSet is gone")


def test_learner_configuration_error_ends_whole_jobset(
    kubectl: Kubectl, node: str, jobset: None, plain: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(wide("wrong", queued=False))
    runs(kubectl, kubelet, "wrong")
    before = {one["metadata"]["uid"] for one in kubectl.list("pods", selector="stage2.dev/role=rollout")}
    lost = learner(kubelet)
    kubelet.learner_ends("wrong", 75)  # its Job makes another pod, and the servers stay
    eventually(lambda: learner(kubelet) != lost, why="its Job makes another pod")
    kubelet.learner_runs("wrong")
    eventually(lambda: phase(kubectl, "wrong") == "Running", why="it runs again")
    assert before == {one["metadata"]["uid"] for one in kubectl.list("pods", selector="stage2.dev/role=rollout")}
    kubelet.learner_ends("wrong", 64, "no such model")
    eventually(lambda: reason(kubectl, "wrong", "Failed") == "ConfigurationError", why="it fails")
    eventually(lambda: kubelet.pod("wrong", "rollout") is None, why="JobSet ends its servers")
    assert "can never change" in kubectl.run("patch", "rmj", "wrong", "--type=merge", "-p", TO_NODE).stderr


def test_multi_pod_learner_is_recreated_whole_in_its_own_domain(
    kubectl: Kubectl, nodes: FakeNodes, jobset: None, plain: Controller
) -> None:
    shared = nodes.add(f"{kubectl.namespace}-shared", gpus=4, labels=HERE)
    kubectl.apply(of_another_jobset(shared, priority="0"))
    for index in (0, 1):
        node = nodes.add(f"{kubectl.namespace}-{index}", gpus=4, labels=HERE)
        kubectl.apply(of_another_jobset(node, priority="7"))
    made = wide("apart", queued=False)
    made["spec"]["placement"]["topology"] = "Exclusive"
    for_pods = {"metadata": {"labels": {OF_PRIORITY: "0"}}}  # by JobSet itself from 0.11 on
    made["spec"] |= {"rollout": {"servers": 1}, "learner": {"nodes": 2, "backoffLimit": 1, "template": for_pods}}
    made["spec"]["config"]["custom"]["extra"]["rollout_matching"]["vllm"]["server"] = {"learners": "sharded"}
    kubectl.apply(made)
    for _ in range(2):
        eventually(lambda: placed(kubectl, "rollout"), why="the servers have a node")
        eventually(lambda: len(placed(kubectl, "learner")) == 2, why="both pods have a node")
        (of_servers,), (of_learner,) = ({*placed(kubectl, role).values()} for role in ("rollout", "learner"))
        assert len({of_servers, of_learner, shared}) == 3
        for name in placed(kubectl, "learner"):
            kubectl.set_status("pod", name, {"phase": "Failed"})


def test_kubectl_scale_adds_and_removes_servers_without_disturbing_others(
    kubectl: Kubectl, node: str, jobset: None, plain: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(wide("elastic", queued=False))
    runs(kubectl, kubelet, "elastic")
    before = {(one["metadata"]["name"], one["metadata"]["uid"]) for one in kubectl.list("pods")}
    for servers in (3, 2):
        kubectl("scale", "rmj/elastic", f"--replicas={servers}")
        if servers == 3:
            kubelet.servers_answer("elastic", role="rollout,batch.kubernetes.io/job-completion-index=2")
        ready = f"{servers}/{servers}"
        eventually(lambda ready=ready: rollout(kubectl) == ready, why=f"{ready} servers answer")
        eventually(lambda: len(names_of(kubectl)) == servers + 1, why="the pods are as many")  # noqa: B023
        assert kubectl("get", "rmj/elastic", "-o", "jsonpath={.status.replicas}").strip() == str(servers)
        listed = kubectl("get", "configmap/elastic-config", "-o", "jsonpath={.data}")
        assert listed.count("base_url") == servers
    assert before == names_of(kubectl), "neither the learner nor the other servers notice"
    assert phase(kubectl, "elastic") == "Running"
    refused = kubectl.run("scale", "rmj/elastic", "--replicas=0").stderr
    assert "vllm.mode server needs rollout servers" in refused


def test_kubectl_scale_of_running_single_node_job_is_refused(kubectl: Kubectl) -> None:
    kubectl.apply(job("fixed", rollout={"servers": 1}))
    assert "set spec.suspend to true" in kubectl.run("scale", "rmj/fixed", "--replicas=2").stderr


def of_another_jobset(node: str, *, priority: str) -> Object:
    """A pod on a node, with the labels of one whose JobSet did not ask for a domain of its own."""
    metadata = {"name": f"of-{node}", "labels": {"jobset.sigs.k8s.io/job-key": "another", OF_PRIORITY: priority}}
    spec = {"nodeName": node, "containers": [{"name": "x", "image": "x", "securityContext": SECURE}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def placed(kubectl: Kubectl, role: str) -> dict[str, str]:
    """The nodes of the pods of `apart` that have one and have not failed, by the pods' names."""
    pods = kubectl.list("pods", selector=f"stage2.dev/job=apart,stage2.dev/role={role}")
    standing = [one for one in pods if one["status"]["phase"] != "Failed" and "nodeName" in one["spec"]]
    return {one["metadata"]["name"]: one["spec"]["nodeName"] for one in standing}


def rollout(kubectl: Kubectl) -> str:
    """The ready servers, of all servers, of `elastic`."""
    return str((kubectl.get("rmj", "elastic") or {}).get("status", {}).get("rollout"))


def names_of(kubectl: Kubectl) -> set[tuple[str, str]]:
    """The names and uids of the pods that are not being deleted."""
    there = [one["metadata"] for one in kubectl.list("pods") if "deletionTimestamp" not in one["metadata"]]
    return {(one["name"], one["uid"]) for one in there}


OF_PRIORITY = "jobset.sigs.k8s.io/priority"
TO_NODE = '{"spec":{"engine":"Node","rollout":{"serversPerPod":1},"placement":{"topologyKey":null}}}'
