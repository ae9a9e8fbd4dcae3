"""Who reaches whom in a job: its NetworkPolicy, enforced by kube-router, between real pods that listen on its ports."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stage2_api.parsing import parse_job
from stage2_api.pod.layout import METRICS_PORT, PROGRESS_PORT
from stage2_controller.children.manifest import Owner, labels
from stage2_controller.children.network import CONTROLLER_LABELS, NAME_SERVER_PORTS, network_policy
from stage2_controller.job import names
from stage2_controller.job.containers import containers
from tests.cluster.controller.conftest import Kubectl, eventually, job
from tests.support.clusters import ON_A_KUBELET

pytestmark = pytest.mark.in_turns(2)
JOB = "guarded"
CHOSEN = 38997  # by the kernel, as for a member of an NCCL group
OTHER = "other"
ROLLOUT, LEARNER, CONTROLLER, STRANGER, FOREIGN = "rollout", "learner", "controller", "stranger", "another-learner"
LISTEN = """
import socket, sys, time
listening = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
time.sleep(1e6)
"""
REACH = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=1).close()
        print(port)
    except OSError:
        pass
"""
Reached = Callable[[str, str], set[int]]


@pytest.fixture(scope="module")
def ports() -> dict[str, list[int]]:
    """What the policy is about: servers, and the learner's groups, progress and metrics; and a port of no name."""
    made = containers(parse_job(job(JOB)), host_for=lambda _: JOB, tls=True)
    group = [port for name, port in made.learner.ports.items() if name.startswith("group-")]
    servers = [server.port for server in made.servers]
    assert len(servers) == len(group) == 3
    return {
        "servers": servers,
        "group": group,
        "chosen": [CHOSEN],
        "progress": [PROGRESS_PORT],
        "metrics": [METRICS_PORT],
        "names": [NAME_SERVER_PORTS[1]],  # the one that a pod without rights may listen on
    }


@pytest.fixture(scope="module")
def guarded(on_local_cluster: Path, controller_image: str) -> Iterator[Kubectl]:
    """kubectl in a namespace of its own, on the local cluster, which enforces policies."""
    kubectl = Kubectl(on_local_cluster, f"stage2-test-{uuid.uuid4().hex[:8]}")
    kubectl("create", "namespace", kubectl.namespace)
    yield kubectl
    kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


@pytest.fixture(scope="module")
def reached(guarded: Kubectl, ports: dict[str, list[int]], controller_image: str) -> Reached:
    """The ports of one pod that another one reaches."""
    everything = sorted({port for some in ports.values() for port in some})
    eventually(lambda: guarded.run("get", "serviceaccount", "default").returncode == 0, why="pods can be created")
    who = {
        ROLLOUT: labels(JOB, names.ROLE_ROLLOUT),
        LEARNER: labels(JOB, names.ROLE_LEARNER),
        FOREIGN: labels(OTHER, names.ROLE_LEARNER),
        CONTROLLER: CONTROLLER_LABELS,
        STRANGER: {"app": "stranger"},
    }
    of_learner = [*ports["group"], *ports["chosen"], *ports["progress"], *ports["metrics"]]
    listens = {ROLLOUT: [*ports["servers"], *ports["chosen"]], LEARNER: of_learner}
    for name, own in who.items():
        guarded.apply(_pod(name, own, controller_image, listens.get(name, everything)))
    guarded("wait", "--for=condition=Ready", "pod", "--all", "--timeout=600s")
    addresses = {name: (guarded.get("pod", name) or {})["status"]["podIP"] for name in who}

    def reach(source: str, target: str) -> set[int]:
        command = ["exec", source, "--", "python3", "-c", REACH, addresses[target], *map(str, everything)]
        return {int(line) for line in guarded(*command).split()}

    assert reach(STRANGER, LEARNER) == set(of_learner), "nothing is closed before there is a policy"
    guarded.apply(_policy(guarded.namespace))
    closed = set(ports["metrics"])
    eventually(lambda: reach(STRANGER, LEARNER) == closed, why="the policy is enforced")
    return reach


def _policy(namespace: str) -> dict[str, Any]:
    made = containers(parse_job(job(JOB)), host_for=lambda _: JOB, tls=True)
    owner = Owner(JOB, namespace)
    return network_policy(owner, made, transport="tcp", controller_namespace=namespace, closed=True)


def _pod(name: str, own: dict[str, str], image: str, ports: list[int]) -> dict[str, Any]:
    container = {
        "name": "listens",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", LISTEN, *map(str, ports)],
        "readinessProbe": {"tcpSocket": {"port": ports[0]}, "periodSeconds": 1},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0, "affinity": ON_A_KUBELET}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": own}, "spec": spec}


def test_only_own_learner_reaches_servers(reached: Reached, ports: dict[str, list[int]]) -> None:
    assert reached(LEARNER, ROLLOUT) == set(ports["servers"])
    assert reached(CONTROLLER, ROLLOUT) == reached(STRANGER, ROLLOUT) == set()
    assert reached(FOREIGN, ROLLOUT) == set(), "the learner of another job is a stranger"


def test_only_own_servers_reach_transfer_ports_of_learner(reached: Reached, ports: dict[str, list[int]]) -> None:
    assert reached(ROLLOUT, LEARNER) >= set(ports["group"])
    assert not reached(ROLLOUT, LEARNER) & set(ports["chosen"])
    assert reached(FOREIGN, LEARNER) == reached(STRANGER, LEARNER) == set(ports["metrics"])


def test_controller_reaches_progress_port_of_learner(reached: Reached, ports: dict[str, list[int]]) -> None:
    assert reached(CONTROLLER, LEARNER) == {*ports["progress"], *ports["metrics"]}


def test_pods_of_job_reach_only_each_other_and_dns_ports(reached: Reached, ports: dict[str, list[int]]) -> None:
    assert reached(LEARNER, STRANGER) == reached(ROLLOUT, STRANGER) == set(ports["names"])
    assert reached(FOREIGN, STRANGER) > set(ports["names"]), "the policy is about this job alone"


def test_pods_of_job_can_resolve_names(reached: Reached, guarded: Kubectl) -> None:
    ask = "import socket; print(socket.gethostbyname('kubernetes.default.svc.cluster.local'))"
    service = guarded.run("get", "service", "kubernetes", "--namespace=default", "-o=jsonpath={.spec.clusterIP}").stdout
    assert guarded("exec", LEARNER, "--", "python3", "-c", ask).strip() == service
