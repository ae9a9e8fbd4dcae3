"""What the controller may do, as the API server tells it, against what it does in a job's whole life."""

import json
import re
from pathlib import Path

from tests.cluster.controller.conftest import HERE, Kubectl, Kubelet, eventually, job, phase, reason
from tests.cluster.controller.test_availability import Replica

# Used by the API server on the controller's behalf: whoever sets blockOwnerDeletion must be allowed to finalize. Those
# on JobSets, and on their Jobs, are used where there are some (kueue/test_jobset.py).
IMPLIED = {
    ("update", "rolloutmatchingjobs/finalizers"),
    ("patch", "jobs"),
    *((verb, "jobsets") for verb in ("get", "create", "delete")),
}
# Used on nobody's grant: every account may ask which groups are served.
ANYBODYS = {("get", "apis")}
# An apply that creates needs both verbs.
APPLIED = ("configmaps", "deployments", "networkpolicies", "services")
WATCHED = (
    "rolloutmatchingjobs",
    "deployments",
    "jobs",
    "services",
    "networkpolicies",
    "pods",
    "nodes",
    "resourcequotas",
)
SYSTEM = {"authorization.k8s.io", "authentication.k8s.io", "certificates.k8s.io"}


SOMEBODYS = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "second-learner"},
    "spec": {
        "suspend": True,
        "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "foreign"}]}},
    },
}


def may(kubectl: Kubectl) -> set[tuple[str, str]]:
    """Verbs and resources of the chart's service account, besides what every account may."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": kubectl.namespace},
    }
    who = f"--as=system:serviceaccount:{kubectl.namespace}:stage2"
    reported = json.loads(kubectl("create", "-f", "-", "-o", "json", "--validate=false", who, stdin=review))["status"][
        "resourceRules"
    ]
    rules = [rule for rule in reported if not SYSTEM & set(rule["apiGroups"])]
    return {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}


def does(replica: Replica) -> set[tuple[str, str]]:
    """Verbs and resources of the requests that were granted, and of the watches."""
    pattern = r'stage2_api_requests_total\{code="(2\d\d|404|409)",resource="([^"]+)",verb="([^"]+)"\}'
    asked = {(verb, resource) for _, resource, verb in re.findall(pattern, replica.figures())}
    asked |= {("create", resource) for resource in APPLIED if ("patch", resource) in asked}
    return (asked - ANYBODYS) | {(verb, resource) for verb in ("list", "watch") for resource in WATCHED}


def replicas(kubectl: Kubectl) -> int | None:
    """How many rollout pods the second job's Deployment wants."""
    found = kubectl.get("deployment", "second-rollout")
    return found["spec"]["replicas"] if found else None


def test_controller_rights_match_what_it_uses(
    kubectl: Kubectl, node: str, rights: Path, kubelet: Kubelet, tmp_path: Path
) -> None:
    replica = Replica(rights, kubectl.namespace, tmp_path / "controller.log")
    replica.start()
    try:
        placement = {"nodeSelector": HERE, "priorityClassName": "system-node-critical"}
        kubectl.apply(job("first", ttlSecondsAfterFinished=1, placement=placement))
        kubectl.apply(job("second"))
        boxed = {"gpus": 1, "template": {"spec": {"runtimeClassName": "none-such"}}}
        kubectl.apply(job("third", suspend=True, learner=boxed))
        for name in ("first", "second"):
            kubelet.servers_answer(name)
            kubelet.learner_runs(name)
        eventually(lambda: phase(kubectl, "second") == "Running", why="the jobs run")
        did = does(replica)
        replica.stop()  # what it made itself it has not read yet
        replica.start()
        kubectl("scale", "deployment", "second-rollout", "--replicas=0")
        eventually(lambda: replicas(kubectl) == 1, why="the controller mends what somebody changed")
        kubectl("patch", "rmj", "second", "--type=merge", "-p", '{"spec": {"suspend": true}}')
        kubelet.learner_ends("first", 0)
        eventually(lambda: kubectl.get("rmj", "first") is None, why="the first has lived its time")
        eventually(lambda: not kubectl.list("deployments", "jobs"), why="the second is suspended")
        kubectl("patch", "rmj", "second", "--type=merge", "-p", '{"spec": {"tls": {"enabled": false}}}')
        eventually(lambda: ("delete", "secrets") in did | does(replica), why="a Secret of another content is wanted")
        kubectl.apply(SOMEBODYS)
        kubectl("patch", "rmj", "second", "--type=merge", "-p", '{"spec": {"suspend": false}}')
        eventually(lambda: reason(kubectl, "second", "ChildrenApplied") == "NameTaken", why="it looks whose the Job is")
        kubectl("patch", "rmj", "second", "--type=merge", "-p", '{"spec": {"suspend": true}}')
        eventually(lambda: ("patch", "events") in did | does(replica), why="an event like an earlier one is counted")
        kubectl("patch", "rmj", "third", "--type=merge", "-p", '{"spec": {"suspend": false}}')
        unmade = "no pod has a RuntimeClass that does not exist, as an event says"
        eventually(lambda: reason(kubectl, "third", "LearnerRunning") == "PodRefused", why=unmade)
        # The lease is renewed by the clock, and a quick machine is done with both jobs before that.
        eventually(lambda: ("update", "leases") in did | does(replica), why="it renews its lease")
        assert may(kubectl) == did | does(replica) | IMPLIED
        assert "forbidden" not in replica.text()
    finally:
        replica.stop()
