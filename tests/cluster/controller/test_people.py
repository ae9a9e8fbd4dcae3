"""People of a namespace, by the roles that every cluster has, and clients that check nothing of what they send."""

import json
from pathlib import Path

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, Object, eventually, job, reason
from tests.cluster.controller.fake_nodes import FakeNodes


def bind(kubectl: Kubectl, role: str) -> str:
    """Somebody who has one of the cluster's own roles in the namespace of the test."""
    person = f"{kubectl.namespace}-{role}"
    kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--user={person}")
    eventually(lambda: may(kubectl, person, "get"), why=f"{role} has what the chart's role of that name adds")
    return person


def may(kubectl: Kubectl, person: str, verb: str, what: str = "rolloutmatchingjobs.stage2.dev") -> bool:
    return kubectl.run("auth", "can-i", verb, what, f"--as={person}").returncode == 0


@pytest.mark.usefixtures("rights")  # the chart's roles, of which the cluster makes view, edit and admin larger
def test_editor_manages_jobs_viewer_reads_them_and_nobody_writes_status(kubectl: Kubectl) -> None:
    assert not may(kubectl, "stranger", "get")
    viewer, editor, boss = (bind(kubectl, role) for role in ("view", "edit", "admin"))
    refused = kubectl.run("create", f"--as={viewer}", "-f", "-", stdin=job())
    assert 'cannot create resource "rolloutmatchingjobs"' in refused.stderr
    kubectl("create", f"--as={editor}", "-f", "-", stdin=job())
    kubectl("patch", "rmj", "job-3v1", f"--as={editor}", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    assert kubectl("get", "rmj", "job-3v1", f"--as={viewer}", "-o", "jsonpath={.spec.suspend}") == "true"
    refused = kubectl.run("delete", "rmj", "job-3v1", f"--as={viewer}")
    assert 'cannot delete resource "rolloutmatchingjobs"' in refused.stderr
    status = ("patch", "rmj", "job-3v1", "--subresource=status", "--type=merge", "-p", '{"status": {"step": 1}}')
    for person in (viewer, editor, boss):
        refused = kubectl.run(*status, f"--as={person}")
        assert 'resource "rolloutmatchingjobs/status"' in refused.stderr, person
    kubectl("delete", "rmj", "job-3v1", f"--as={editor}")
    assert [may(kubectl, person, "deletecollection") for person in (viewer, editor, boss)] == [False, False, True]


def misspelt(name: str) -> Object:
    """A job whose configuration has a key that no section has, beside one that is right."""
    made = job(name)
    made["spec"]["config"]["training"]["learning_rat"] = 0.1
    return made


def test_misspelled_key_is_refused_with_and_without_admission_policy(kubectl: Kubectl, controller: Controller) -> None:
    """By the policy of admission where that is bound, and by the controller where it is not."""
    lax = ("create", "--validate=false", "-f", "-")
    done = kubectl.run(*lax, stdin=misspelt("bound"))
    assert (done.returncode, kubectl.list("rmj")) == (1, [])
    assert "learning_rat" in done.stderr

    kubectl("label", "namespace", kubectl.namespace, "stage2.dev/unguarded=yes")
    eventually(lambda: kubectl.run(*lax, stdin=misspelt("unbound")).returncode == 0, why="nobody looks at the door")
    kept = (kubectl.get("rmj", "unbound") or {})["spec"]["config"]["training"]
    assert kept["learning_rat"] == 0.1
    eventually(lambda: reason(kubectl, "unbound", "Accepted") == "InvalidSpec", why="the controller refuses it")
    accepted = (kubectl.get("rmj", "unbound") or {})["status"]["conditions"][0]
    assert accepted["message"].startswith("spec.config.training.learning_rat: 0.1; is not a key")
    assert "did you mean spec.config.training.learning_rate?" in accepted["message"]
    assert not kubectl.list("deployments", "jobs", "pods")


def test_job_uses_allowed_service_account_and_gpu_type_and_kubectl_get_shows_columns(
    kubectl: Kubectl, rights: Path, nodes: FakeNodes, kubelet: Kubelet, tmp_path: Path
) -> None:
    """The pods run as the account that the admin allows, on the one node of two types that are asked for: the learner
    with the token that it asks for, the servers with none. A job that waits for a queue says so in a column."""
    for kind in ("a10", "h100"):  # of nodes that are alike, the first by name is taken
        nodes.add(f"{kubectl.namespace}-{kind}", gpus=4, labels={**HERE, "gpu": kind})
    policy = json.dumps({"serviceAccounts": ["trainer"]})
    with Controller(rights, kubectl.namespace, tmp_path / "controller.log", "--policy", policy):
        kubectl("create", "serviceaccount", "trainer")
        wanted = {"key": "gpu", "operator": "In", "values": ["a100", "h100"]}
        required = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        template = {"spec": {"serviceAccountName": "trainer"}}
        token = {"serviceAccountToken": {"path": "token", "audience": "vault", "expirationSeconds": 3600}}
        asks = {"spec": {**template["spec"], "volumes": [{"name": "vault", "projected": {"sources": [token]}}]}}
        asked = job(
            rollout={"servers": 3, "template": template},
            learner={"gpus": 1, "template": asks},
            placement={"nodeSelector": HERE, "affinity": affinity},
        )
        kubectl.apply(asked)
        queued = job("queued")
        queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
        kubectl.apply(queued)
        bound = lambda: [pod["spec"].get("nodeName") for pod in kubectl.list("pods")]  # noqa: E731
        eventually(lambda: bound() == [f"{kubectl.namespace}-h100"] * 2, why="both pods are on the one that suits")
        assert "NodeFull" not in {event["reason"] for event in kubectl.list("events")}, "nor were they elsewhere before"
        for pod in kubectl.list("pods"):
            spec = pod["spec"]
            assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("trainer", False)
            projected = [one["projected"]["sources"] for one in spec["volumes"] if "projected" in one]
            assert projected == ([[token]] if pod["metadata"]["labels"]["stage2.dev/role"] == "learner" else [])
            (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ]
            assert wanted in term["matchExpressions"]
        eventually(lambda: reason(kubectl, "queued", "Training") == "KueueDisabled", why="the other waits")
        kubelet.servers_answer("job-3v1", ready=False)
        eventually(lambda: reason(kubectl, "job-3v1", "Training") == "ServersLoading", why="this one loads")
        header, *rows = (line.split() for line in kubectl("get", "rmj").splitlines())
        assert header == ["NAME", "PHASE", "STEP", "ROLLOUT", "NODE", "QUEUE", "REASON", "AGE"]
        shown = {row[0]: row for row in rows}
        assert shown["queued"][-3:-1] == ["team", "KueueDisabled"]
        assert shown["job-3v1"][-2] == "ServersLoading"
