"""What jobs stand on goes away while they run: the API server, what a watch missed, a node, the right time.

Nothing is lost: pods that run keep their uids, and what happened meanwhile is caught up.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from local_cluster.layout import Layout
from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, eventually, job, phase, reason
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_availability import Replica
from tests.support.clusters import LocalCluster

pytestmark = pytest.mark.in_turns(4, apart=True)

HOUR = timedelta(hours=1)
JOBS = "/apis/stage2.dev/v1alpha1/namespaces/{}/rolloutmatchingjobs"


def pods(kubectl: Kubectl, name: str) -> dict[str, str]:
    """The uid of each of a job's pods; those that end are not among them."""
    found = kubectl.list("pods", selector=f"stage2.dev/job={name}")
    return {
        pod["metadata"]["labels"]["stage2.dev/role"]: pod["metadata"]["uid"]
        for pod in found
        if "deletionTimestamp" not in pod["metadata"]
    }


@contextmanager
def without_api_server(kubectl: Kubectl, local_cluster: LocalCluster) -> Iterator[None]:
    """The local cluster while its API server is killed; afterwards it answers again."""
    os.kill(_record("kube-apiserver")["pid"], signal.SIGKILL)
    try:
        yield
    finally:
        local_cluster("mend")
        eventually(lambda: kubectl.run("get", "--raw", "/readyz").returncode == 0, why="it answers")


def compact() -> None:
    """Let etcd forget every state but the present one, as it does for the API server every five minutes."""
    flag = "--listen-client-urls="
    url = next(one for one in _record("etcd")["argv"] if one.startswith(flag)).removeprefix(flag)
    revision = _of_etcd(f"{url}/v3/kv/range", {"key": "AA=="})["header"]["revision"]
    _of_etcd(f"{url}/v3/kv/compaction", {"revision": revision, "physical": True})


def _record(name: str) -> dict:
    return json.loads((Layout.default().records / f"{name}.json").read_text())


def _of_etcd(url: str, body: object) -> dict:
    with urlopen(Request(url, json.dumps(body).encode())) as answer:
        return json.loads(answer.read())


@pytest.mark.alone
def test_api_server_outage_costs_no_pod_and_missed_changes_are_caught_up(
    on_local_cluster: Path,
    local_cluster: LocalCluster,
    kubectl: Kubectl,
    node: str,
    rights: Path,
    kubelet: Kubelet,
    tmp_path: Path,
) -> None:
    with Replica(rights, kubectl.namespace, tmp_path / "controller.log") as replica:
        for name in ("stays", "ends"):
            kubectl.apply(job(name))
            kubelet.job_runs(name)
        before = pods(kubectl, "stays")
        with without_api_server(kubectl, local_cluster):
            eventually(replica.ended, why="who cannot renew the Lease leads no more")
        kubelet.learner_ends("ends", 0)
        kubectl.apply(job("comes"))
        replica.start()  # as its kubelet does
        eventually(lambda: phase(kubectl, "ends") == "Succeeded", why="an end is seen")
        kubelet.job_runs("comes")
        assert phase(kubectl, "stays") == "Running"
        assert pods(kubectl, "stays") == before
        assert "Traceback" not in replica.text(), replica.text()[-3000:]


@pytest.mark.alone
@pytest.mark.skipif(
    "STAGE2_COMPACTION" not in os.environ, reason="Kubernetes' own controllers take minutes to list everything again"
)
def test_expired_watch_restarts_and_misses_nothing(
    on_local_cluster: Path,
    local_cluster: LocalCluster,
    kubectl: Kubectl,
    controller: Controller,
    kubelet: Kubelet,
) -> None:
    """The controller stands still meanwhile: all that it knows is from before the API server's restart."""
    for name in ("stays", "ends", "goes"):
        kubectl.apply(job(name))
        kubelet.job_runs(name)
    before, known = pods(kubectl, "stays"), kubectl.list("rmj")
    controller.send(signal.SIGSTOP)
    with without_api_server(kubectl, local_cluster):
        compact()
    kubelet.learner_ends("ends", 0)
    kubectl("delete", "rmj", "goes", "--wait=false")
    kubectl("annotate", "rmj", "stays", "poke=1")
    kubectl.apply(job("comes"))
    newest = max(int(one["metadata"]["resourceVersion"]) for one in known)
    watched = kubectl(
        "get", "--raw", f"{JOBS.format(kubectl.namespace)}?watch=1&resourceVersion={newest}&timeoutSeconds=5"
    )
    assert json.loads(watched.splitlines()[0])["object"]["code"] == 410, "what the controller's watch is told"
    controller.send(signal.SIGCONT)
    eventually(lambda: phase(kubectl, "ends") == "Succeeded", why="an end is seen")
    kubelet.job_runs("comes")
    eventually(lambda: pods(kubectl, "goes") == {}, why="what was deleted has no pods", timeout_s=300)
    assert phase(kubectl, "stays") == "Running"
    assert pods(kubectl, "stays") == before


def test_job_stays_on_not_ready_node_until_node_is_declared_out_of_service(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    """A silent node may still run the learner: a second one would write to the same checkpoints."""
    lost = nodes.add(f"{kubectl.namespace}-lost", gpus=4, labels=HERE)
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    before = pods(kubectl, "job-3v1")
    nodes.silence(lost)
    eventually(lambda: reason(kubectl, "job-3v1", "Placed") == "NodeNotReady", why="the job says why it stays")
    time.sleep(5)  # by the clock: nothing may happen; a slow machine can only miss the defect
    assert pods(kubectl, "job-3v1") == before
    kubectl("taint", "node", lost, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")

    def moved() -> bool:
        found = kubectl.list("pods", selector="stage2.dev/job=job-3v1")
        learners = [pod for pod in found if pod["metadata"]["labels"]["stage2.dev/role"] == "learner"]
        assert len({pod["spec"].get("nodeName") for pod in learners}) <= 1, "a second learner beside the first"
        return len(found) == 2 and {pod["spec"].get("nodeName") for pod in found} == {node}

    eventually(moved, why="the whole job moves")
    kubelet.job_runs("job-3v1")


class Clock:
    """The clock of one process, which jumps: libfaketime reads from a file how far it is off.

    Time that only counts, which a kernel never sets, goes on as it is.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.off_by(timedelta())
        self.environment = {
            "LD_PRELOAD": "/usr/$LIB/faketime/libfaketime.so.1",
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def off_by(self, time: timedelta) -> None:
        """Set it so far ahead of the true time, or behind it."""
        written = self._file.with_suffix(".new")
        written.write_text(f"{time.total_seconds():+.0f}\n")
        written.replace(self._file)


@pytest.fixture
def clock(kubectl: Kubectl, tmp_path: Path) -> Clock:
    """A clock for the controller; what boots a local cluster has installed what it takes."""
    if shutil.which("faketime") is None:
        pytest.skip("no libfaketime (Debian's package faketime)")
    return Clock(tmp_path / "clock")


def test_clock_jump_ends_no_job_and_keeps_lease(
    kubectl: Kubectl, node: str, rights: Path, kubelet: Kubelet, clock: Clock, tmp_path: Path
) -> None:
    """One job starts while the clock is ahead, the other one sees it ahead and behind; each may take an hour."""
    replica = Replica(rights, kubectl.namespace, tmp_path / "controller.log")
    replica.environment = clock.environment
    clock.off_by(3 * HOUR)
    with replica:
        for name, jumps in (("early", (timedelta(),)), ("late", (HOUR / 2, -3 * HOUR, timedelta()))):
            kubectl.apply(job(name, activeDeadlineSeconds=3600))
            kubelet.job_runs(name)
            before = pods(kubectl, name)
            for off in jumps:
                clock.off_by(off)
                kubectl("annotate", "rmj", name, f"off={off.total_seconds()}", "--overwrite")
                time.sleep(3)  # by the clock: nothing may happen while the Lease is renewed
                assert (phase(kubectl, name), pods(kubectl, name)) == ("Running", before), str(off)
                assert abs(started(kubectl, name) - datetime.now(UTC)) < HOUR / 6, "the deadline counts from then"
            kubelet.learner_ends(name, 0)
            eventually(lambda name=name: phase(kubectl, name) == "Succeeded", why=f"{name} ends by itself")
        assert replica.leads()
        assert "no longer leading" not in replica.text()
        assert "Traceback" not in replica.text(), replica.text()[-3000:]


def started(kubectl: Kubectl, name: str) -> datetime:
    """When the job started, as its status says."""
    return datetime.fromisoformat((kubectl.get("rmj", name) or {})["status"]["startTime"])
