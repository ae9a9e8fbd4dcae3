"""Two controllers, one Lease: one works, the other takes over, and jobs do not notice."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.cluster.controller.conftest import Controller, Kubectl, Kubelet, eventually, job, phase
from tests.support.ports import free_port

# Six children, the address of its servers, and its status in four stages at most: news that come together are one.
REQUESTS_OF_A_JOB = 11
KINDS = 12  # that the controller lists, at most
EVENTS_OF_A_JOB = 5
WRITES = "create|patch|update|delete"
pytestmark = [pytest.mark.timeout(300), pytest.mark.in_turns(3, apart=True)]


class Replica(Controller):
    """A controller that shares its work by the Lease of the chart's release."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path) -> None:
        self.port = free_port()
        options = (f"--lease={namespace}/stage2", f"--listen=127.0.0.1:{self.port}", "--progress-seconds=2")
        super().__init__(kubeconfig, namespace, log, *options)

    def figures(self) -> str:
        """All of its figures, as Prometheus reads them."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            text: str = answer.read().decode()
        return text

    def figure(self, name: str) -> float:
        """One of its figures."""
        return float(next(line.split()[-1] for line in self.figures().splitlines() if line.startswith(name)))

    def requests(self, verb: str, about: str = '(?!leases)[^"]+') -> float:
        """Requests to the API server so far, watches and the Lease left out."""
        pattern = rf'^stage2_api_requests_total\{{code="\d+",resource="{about}",verb="(?:{verb})"\}} (\S+)$'
        return sum(map(float, re.findall(pattern, self.figures(), re.MULTILINE)))

    def is_ready(self) -> bool:
        """Whether its readiness probe passes."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/readyz") as answer:
                return bool(answer.status == 200)
        except HTTPError:
            return False

    def leads(self) -> bool:
        """Whether it says so itself."""
        return self.figure("stage2_leader") == 1


@pytest.fixture
def replicas(kubectl: Kubectl, node: str, rights: Path, tmp_path: Path) -> Iterator[list[Replica]]:
    made = [Replica(rights, kubectl.namespace, tmp_path / f"controller-{index}.log") for index in range(2)]
    for replica in made:
        replica.start()
    yield made
    for replica in made:
        replica.stop()
        assert "Traceback" not in replica.text(), replica.text()


def test_standby_controller_takes_over_when_leader_is_killed(
    kubectl: Kubectl, replicas: list[Replica], kubelet: Kubelet
) -> None:
    eventually(lambda: [replica.leads() for replica in replicas].count(True) == 1, why="one leads")
    leader, follower = sorted(replicas, key=lambda replica: not replica.leads())
    eventually(follower.is_ready, why="it has tried what it may list")
    tried = follower.requests(".+")
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    assert follower.requests(".+") == tried < KINDS, "but for the Lease"
    assert follower.figure("stage2_reconcile_seconds_count") == 0
    assert follower.requests(".+", "leases") > 0
    assert follower.is_ready()
    leader.stop(kill=True)
    kubelet.learner_ends("job-3v1", 0)
    eventually(lambda: phase(kubectl, "job-3v1") == "Succeeded", why="the other goes on", timeout_s=60)
    assert follower.leads()


def holder(kubectl: Kubectl) -> str:
    lease = kubectl.get("lease", "stage2") or {}
    return str(lease["spec"].get("holderIdentity") or "")


def test_terminating_leader_hands_over_at_once(kubectl: Kubectl, replicas: list[Replica]) -> None:
    eventually(lambda: any(replica.leads() for replica in replicas), why="one leads")
    leader, follower = sorted(replicas, key=lambda replica: not replica.leads())
    held = holder(kubectl)
    leader.stop()
    assert held
    assert holder(kubectl) != held, "the Lease would otherwise have to expire"
    eventually(follower.leads, why="the other leads")


def test_terminating_standby_exits_at_once(replicas: list[Replica]) -> None:
    eventually(lambda: any(replica.leads() for replica in replicas), why="one leads")
    follower = next(replica for replica in replicas if not replica.leads())
    follower.stop()
    assert follower.exit_code == 0
    assert "Unclosed" not in follower.text()


def test_leader_that_lost_lease_exits(kubectl: Kubectl, replicas: list[Replica]) -> None:
    eventually(lambda: any(replica.leads() for replica in replicas), why="one leads")
    leader = next(replica for replica in replicas if replica.leads())
    kubectl("patch", "lease", "stage2", "--type=merge", "-p", '{"spec": {"holderIdentity": "somebody"}}')
    eventually(lambda: "no longer leading" in leader.text(), why="it notices")
    eventually(leader.ended, why="it ends")


def test_job_startup_requests_are_bounded_and_running_job_causes_no_writes(
    kubectl: Kubectl, node: str, rights: Path, kubelet: Kubelet, tmp_path: Path
) -> None:
    names = [f"job-{index}" for index in range(4)]
    with Replica(rights, kubectl.namespace, tmp_path / "controller.log") as replica:
        kubectl.apply({"apiVersion": "v1", "kind": "List", "items": [job(name) for name in names]})
        for name in names:
            kubelet.servers_answer(name)
            kubelet.learner_runs(name)
        eventually(lambda: all(phase(kubectl, name) == "Running" for name in names), why="all jobs run", timeout_s=60)
        reported = replica.requests("create", "events")
        assert replica.requests(WRITES) - reported <= REQUESTS_OF_A_JOB * len(names)
        assert reported <= EVENTS_OF_A_JOB * len(names)

        def rests() -> bool:
            written = replica.requests(WRITES)
            # Every learner is asked for its progress twice, and does not answer.
            time.sleep(6)  # by the clock: the time between two looks; it looks again
            return replica.requests(WRITES) == written

        eventually(rests, why="it writes no more")
