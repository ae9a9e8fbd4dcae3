"""What whoever is on call sees of jobs on a real API server: why they do not train, and the GPUs that they hold."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.controller.conftest import Kubectl, Kubelet, eventually, job, phase
from tests.cluster.controller.test_availability import Replica


@pytest.fixture
def replica(kubectl: Kubectl, node: str, rights: Path, tmp_path: Path) -> Iterator[Replica]:
    with Replica(rights, kubectl.namespace, tmp_path / "controller.log") as made:
        yield made
    assert "Traceback" not in made.text(), made.text()


def series(replica: Replica, namespace: str) -> dict[str, float]:
    """Those of jobs, without what their labels have in common."""
    common = f'name="job-3v1",namespace="{namespace}"'
    lines = [line.split() for line in replica.figures().splitlines() if common in line]
    return {name.replace(f"{{{common}}}", "").replace(f"{common},", ""): float(value) for name, value in lines}


def test_metrics_show_gpus_held_without_work_and_rules_broken_by_running_job(
    kubectl: Kubectl, replica: Replica, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(name: str, value: float = 1) -> None:
        eventually(lambda: series(replica, kubectl.namespace).get(name) == value, why=f"{name} is {value}")

    kubectl.apply(job(image="my/trainer:1"))
    seen("stage2_job_gpus_held", 4)
    seen('stage2_job_phase{phase="Starting",reason="ContainersStarting"}')
    kubelet.servers_answer("job-3v1", ready=False)
    seen('stage2_job_phase{phase="Starting",reason="ServersLoading"}')
    seen('stage2_job_problem{condition="RolloutReady",reason="ServersLoading"}')
    assert "stage2_job_report_age_seconds" not in series(replica, kubectl.namespace)

    kubelet.job_runs("job-3v1")
    seen('stage2_job_phase{phase="Running",reason="NotSyncedYet"}')
    assert not [name for name in series(replica, kubectl.namespace) if 'condition="RolloutReady"' in name]
    monkeypatch.setitem(os.environ, "STAGE2_POLICY", json.dumps({"imageRegistries": ["another/"]}))
    replica.stop()
    replica.start()
    seen('stage2_job_problem{condition="Accepted",reason="NoLongerValid"}')
    kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    eventually(lambda: phase(kubectl, "job-3v1") == "Suspended", why="it is suspended")
    seen("stage2_job_gpus_held", 0)
