"""The Workload against Kueue's own definitions, whose Go module is fetched where Go is; a hand plays Kueue."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.controller.conftest import Controller, Kubectl, Kubelet, chart_rights, eventually, job, phase, reason

pytestmark = pytest.mark.timeout(300)
MODULE = "sigs.k8s.io/kueue@v0.19.2"
CRD = "config/components/crd/bases/kueue.x-k8s.io_workloads.yaml"
NAME = "workloads.kueue.x-k8s.io"


@pytest.fixture(scope="module")
def definitions(admin: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kueue's Workload on the cluster; one that it did not have before goes at the end."""
    if admin.get("crd", NAME) is not None:
        yield
        return
    go = shutil.which("go") or pytest.skip("no Go to fetch Kueue's module with")
    folder = tmp_path_factory.mktemp("module")
    environment = {**os.environ, "GOFLAGS": "-mod=mod"}
    command = [str(go), "mod", "download", "-json", MODULE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"Kueue's module cannot be had: {done.stdout}{done.stderr}")
    admin("apply", "--server-side", "-f", str(Path(json.loads(done.stdout)["Dir"]) / CRD))
    eventually(lambda: admin.run("get", "workloads").returncode == 0, why="the API server serves the definition")
    yield
    admin("delete", "crd", NAME)


@pytest.fixture
def controller(definitions: None, kubectl: Kubectl, node: str, helm: str, tmp_path: Path) -> Iterator[Controller]:
    """A controller that knows Kueue, with the rights that the chart gives it then."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(chart_rights(kubectl, helm, "controller.kueue=true")))
    running = Controller(kubeconfig, kubectl.namespace, tmp_path / "controller.log", "--kueue")
    running.start()
    yield running
    running.stop()
    assert "Traceback" not in running.text(), running.text()


def test_a_queued_job_waits_runs_where_kueue_says_is_evicted_and_waits_again(
    kubectl: Kubectl, controller: Controller, node: str, kubelet: Kubelet
) -> None:
    made = job()
    made["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    kubectl.apply(made)
    name = "job-3v1-quota"
    eventually(lambda: kubectl.get("workload", name), why="the Workload exists")
    eventually(lambda: reason(kubectl, "job-3v1", "QuotaReserved") == "QuotaPending", why="the job says that it waits")
    assert kubectl.list("deployments", "jobs", "pods") == []

    kubectl.set_status("workload", name, _admitted(node))
    kubelet.servers_answer("job-3v1")
    kubelet.learner_runs("job-3v1")
    eventually(lambda: phase(kubectl, "job-3v1") == "Running", why="the admitted job runs")
    eventually(lambda: "PodsReady" in _true(kubectl, name), why="Kueue is told")

    evicted = _condition("Evicted", "Preempted")
    told = (kubectl.get("workload", name) or {})["status"]["conditions"]
    kubectl.set_status("workload", name, {"conditions": [*told, evicted]})
    eventually(lambda: not kubectl.list("deployments", "jobs", "pods"), why="the job has no pods", timeout_s=60)
    eventually(lambda: "QuotaReserved" not in _true(kubectl, name), why="its quota is free")
    assert (kubectl.get("workload", name) or {})["status"].get("admission") is None


def _admitted(host: str) -> dict[str, object]:
    slices = [{"domainCount": 1, "podCounts": {"universal": 1}, "valuesPerLevel": [{"universal": host}]}]
    topology = {"levels": ["kubernetes.io/hostname"], "slices": slices}
    assignments = [
        {"name": role, "count": 1, "flavors": {"nvidia.com/gpu": "default"}, "topologyAssignment": topology}
        for role in ("rollout", "learner")
    ]
    conditions = [_condition("QuotaReserved", "QuotaReserved"), _condition("Admitted", "Admitted")]
    return {"conditions": conditions, "admission": {"clusterQueue": "all", "podSetAssignments": assignments}}


def _condition(kind: str, why: str) -> dict[str, str]:
    when = "2026-01-01T00:00:00Z"
    return {"type": kind, "status": "True", "reason": why, "message": "by hand", "lastTransitionTime": when}


def _true(kubectl: Kubectl, name: str) -> set[str]:
    conditions = (kubectl.get("workload", name) or {}).get("status", {}).get("conditions", [])
    return {item["type"] for item in conditions if item["status"] == "True"}
