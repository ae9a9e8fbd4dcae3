"""`make red-team`: start a job on a cluster with stage2, attack it from three sides, print what each got.

The cluster is the one that KUBECONFIG names, with the chart installed and the images of `make demo-cluster`; it must
enforce NetworkPolicies. Everything happens in a namespace of its own, which is deleted afterwards. Exit code 1 where
anything was got that the threat model says is held.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from stage2_api.parsing import parse_job
from stage2_api.pod.layout import METRICS_PORT, PROGRESS_PORT
from stage2_controller.children.manifest import labels
from stage2_controller.job import names
from stage2_controller.job.containers import containers
from tests.red_team import tenant
from tests.red_team.attempt import Attempt, beside_control, table
from tests.red_team.cluster import Cluster, eventually
from tests.support.tools import chosen_cluster, tool

JOB = Path(__file__).parents[2] / "examples" / "job-3v1-tiny.yaml"
NAME = "target"
STRANGER, TWIN, POSER, BYSTANDER = "stranger", "twin", "poser", "bystander"
LISTENS = 8000
OTHER_PORTS = (22, 80, 443, 1234, 5000, 8080, 8443, 10250, 29500)
OUTSIDE = ("1.1.1.1:53", "1.1.1.1:443", "kubernetes.default.svc:443", "169.254.169.254:80")
STALL_S, POSE_S = 30, 60


def main() -> int:
    """Attack a job on the cluster that KUBECONFIG names; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="stage2/controller:dev", help="with Python and cryptography, for attackers")
    options = parser.parse_args()
    with chosen_cluster():
        return attack(options.image)


def attack(image: str) -> int:
    """Attack a job in a namespace of its own; return the exit code."""
    namespace = f"red-team-{uuid.uuid4().hex[:6]}"
    admin = Cluster(tool("kubectl"), namespace)
    admin("create", "namespace", namespace)
    try:
        job = target()
        admin.apply(*attackers(image, STRANGER, TWIN, BYSTANDER), *tenant_rights(namespace), job)
        print(f"waiting for {namespace}/{NAME} to train", file=sys.stderr, flush=True)
        step = eventually(lambda: steps(admin), why="the job trains")
        found = []
        for one in Attack(admin, job, image).everything(step):
            found.append(one)
            print(f"{len(found)}: {one.outcome} {one.who} {one.what}", file=sys.stderr, flush=True)
    finally:
        admin.run("delete", "namespace", namespace, "--wait=false")
    print(table(found))
    return int(any(one.outcome == "GOT" for one in found))


def target() -> dict[str, Any]:
    """Return the job that is attacked: the tiny example, for as long as the attack takes."""
    job: dict[str, Any] = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    job["metadata"] = {"name": NAME}
    job["spec"]["gpuResource"] = ""
    job["spec"]["config"]["training"] |= {"max_steps": 100_000, "save_strategy": "no", "eval_strategy": "no"}
    return job


_SLEEPS = ["sleep", "3600"]
_LISTENS = ["python3", "-m", "http.server", str(LISTENS)]


def attackers(image: str, *which: str) -> list[dict[str, Any]]:
    """Return pods without rights: with no label of the job, with its learner's, with its servers'."""
    worn = {
        STRANGER: {"app": STRANGER},
        BYSTANDER: {"app": BYSTANDER},
        TWIN: labels(NAME, "learner"),
        POSER: labels(NAME, "rollout"),
    }
    does = {BYSTANDER: _LISTENS}  # the ports of the others are theirs to take
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": worn[name]},
            "spec": {
                "containers": [
                    {
                        "name": "attacks",
                        "image": image,
                        "command": does.get(name, _SLEEPS),
                        "imagePullPolicy": "IfNotPresent",
                    }
                ],
                "terminationGracePeriodSeconds": 0,
            },
        }
        for name in which
    ]


def tenant_rights(namespace: str) -> list[dict[str, Any]]:
    """Return a service account that may write jobs and nothing else."""
    rights, api = {"name": "tenant"}, "rbac.authorization.k8s.io"
    verbs = ["create", "get", "list", "watch", "update", "patch", "delete"]
    rules = [{"apiGroups": ["stage2.dev"], "resources": ["rolloutmatchingjobs"], "verbs": verbs}]
    subject = {"kind": "ServiceAccount", "name": "tenant", "namespace": namespace}
    role = {"apiGroup": api, "kind": "Role", "name": "tenant"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": rights},
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": rights, "rules": rules},
        {"apiVersion": f"{api}/v1", "kind": "RoleBinding", "metadata": rights, "subjects": [subject], "roleRef": role},
    ]


def steps(admin: Cluster) -> int:
    """Return the job's optimizer steps so far, as its status has them."""
    return int(((admin.get("rmj", NAME) or {}).get("status") or {}).get("step") or 0)


@dataclass(frozen=True)
class Attack:
    """The attack on one job that trains."""

    admin: Cluster
    job: Mapping[str, Any]
    image: str

    def everything(self, step: int) -> Iterator[Attempt]:
        """Yield every attempt of the pods and of the tenant; `step`: how far the job was before."""
        made = containers(parse_job(self.job), host_for=lambda _: NAME, tls=True)
        servers = [str(server.port) for server in made.servers]
        groups = [str(port) for port in made.learner.group_ports]
        rollout, learner = (address_of(self.admin, role) for role in ("rollout", "learner"))
        yield from self._knocks(rollout, learner, servers, groups)
        for port in servers:
            yield from self._tried(TWIN, "ask", rollout, port)
        yield from self._tried(TWIN, "progress", learner, str(PROGRESS_PORT))
        yield from self._tried(TWIN, "join", learner, *groups)
        yield from self._left()
        yield self._stalled(TWIN, rollout, servers)
        yield self._stalled(TWIN, learner, groups)
        yield from tenant.attempts(self.admin, Cluster(tool("kubectl"), self.admin.namespace, "tenant"), self.job)
        after = steps(self.admin)
        yield Attempt("all", "to end the training", "held" if after > step else "GOT", f"it is at step {after}")
        yield from self._posed(learner, servers)

    def _left(self) -> Iterator[Attempt]:
        """Connect out of the job, beside a pod that no policy holds: what that cannot reach, nobody is kept from."""
        addresses = (*OUTSIDE, f"{address_of_pod(self.admin, BYSTANDER)}:{LISTENS}")
        control = list(self._tried(STRANGER, "connect_out", *addresses))
        if not any(one.outcome == "GOT" for one in control):
            raise RuntimeError("a pod that no policy holds reaches no address: what is held there says nothing")
        yield from beside_control(list(self._tried(TWIN, "connect_out", *addresses)), control)

    def _posed(self, learner: str, servers: list[str]) -> Iterator[Attempt]:
        """Stand where a server of the job would, in all that one of its pods wears."""
        (pod,) = attackers(self.image, POSER)
        uid = self.admin.get("rmj", NAME)["metadata"]["uid"]
        pod["metadata"]["annotations"] = {names.ANNOTATION_JOB: NAME, names.ANNOTATION_JOB_UID: uid}
        self.admin.apply(pod)
        self.admin("wait", "--for=condition=Ready", "pod", POSER, "--timeout=300s")
        before, reached = steps(self.admin), False
        for result in self.admin.from_pod(POSER, "pose", str(POSE_S), learner, *servers):
            if result.get("listening"):
                knocks = self.admin.from_pod(TWIN, "knock", address_of_pod(self.admin, POSER), *servers)
                reached = any(one["outcome"] == "GOT" for one in knocks)
            if "what" in result:
                yield Attempt(POSER, result["what"], result["outcome"], result["detail"])
            if result.get("connections") == 0:
                reached = False
        if not reached:
            raise RuntimeError("a pod of the job cannot reach the one that poses: that it is held says nothing")
        gone, phase = steps(self.admin) - before, self.admin.get("rmj", NAME)["status"]["phase"]
        detail = f"{gone} steps in {POSE_S} s; the job is {phase}"
        yield Attempt(POSER, "to end the training", "held" if gone > 0 and phase == "Running" else "GOT", detail)

    def _knocks(self, rollout: str, learner: str, servers: list[str], groups: list[str]) -> Iterator[Attempt]:
        others = [str(port) for port in OTHER_PORTS]
        yield from self._tried(STRANGER, "knock", rollout, *servers, *others)
        yield from self._tried(STRANGER, "knock", learner, *groups, str(PROGRESS_PORT), *others)
        yield from self._tried(TWIN, "knock", learner, str(PROGRESS_PORT), *others)
        metrics = list(self._tried(STRANGER, "knock", learner, str(METRICS_PORT)))
        if any(one.outcome == "held" for one in metrics):
            raise RuntimeError(f"nothing of {learner} can be reached: what is held here says nothing")
        yield from (replace(one, outcome="open", detail="metrics, by design") for one in metrics)

    def _tried(self, pod: str, command: str, *words: str) -> Iterator[Attempt]:
        for result in self.admin.from_pod(pod, command, *words):
            if "what" in result:
                yield Attempt(pod, result["what"], result["outcome"], result["detail"])

    def _stalled(self, pod: str, host: str, ports: list[str]) -> Attempt:
        """Hold connections for a while; the training must not stand still meanwhile."""
        before, held = 0, 0
        for result in self.admin.from_pod(pod, "stall", host, str(STALL_S), *ports):
            before, held = steps(self.admin), result["held"]
        gone = steps(self.admin) - before
        what = f"the time of the training, by {held} connections to ports {', '.join(ports)}"
        return Attempt(pod, what, "held" if gone > 0 else "GOT", f"{gone} steps in {STALL_S} s")


def address_of(admin: Cluster, role: str) -> str:
    """Return the address of the job's own pod of a role."""
    owner = "ReplicaSet" if role == "rollout" else "Job"
    for pod in yaml.safe_load(admin("get", "pods", f"--selector=stage2.dev/job={NAME}", "--output=yaml"))["items"]:
        if any(one["kind"] == owner for one in pod["metadata"].get("ownerReferences", [])):
            return str(pod["status"]["podIP"])
    raise RuntimeError(f"the job has no {role} pod")


def address_of_pod(admin: Cluster, name: str) -> str:
    """Return the address of a pod."""
    return str(admin.get("pod", name)["status"]["podIP"])


if __name__ == "__main__":
    sys.exit(main())
