"""A TrainJob of `stage2 render --trainjob` on the real controller of Kubeflow Trainer, with its webhooks.

The API server runs alone: Trainer makes the JobSet, and the test writes what JobSet's controller would say of it.
"""

import base64
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from rich.console import Console

from local_cluster.layout import Layout
from local_cluster.steps import Steps
from local_cluster.toolchain import MODULE, Binary, ensure_binaries, path_of
from stage2_cli.render import render_job
from tests.cluster.controller.conftest import Kubectl, eventually

JOB = Path(__file__).parents[2] / "examples" / "job-jobset.yaml"
NAME = "job-jobset-jobset"
TRAINER = "github.com/kubeflow/trainer/v2"
PROGRAM = Binary("trainer", f"{TRAINER}/cmd/trainer-controller-manager")
ENDED = {"type": "Completed", "status": "True", "reason": "AllJobsCompleted", "message": "the learner is done"}
ENDED |= {"lastTransitionTime": "2026-01-01T00:00:00Z"}


def module(name: str) -> Path:
    """Return the folder of a Go module of the local cluster."""
    command = ["go", "list", "-m", "-f={{.Dir}}", name]
    return Path(subprocess.run(command, cwd=MODULE, check=True, capture_output=True, text=True).stdout.strip())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def kubectl(apiserver: Path) -> Kubectl:
    """kubectl on an API server that knows JobSets and TrainJobs, by their own definitions."""
    made = Kubectl(apiserver)
    for name, folder in (("sigs.k8s.io/jobset", "config/components/crd/bases"), (TRAINER, "manifests/base/crds")):
        for file in sorted((module(name) / folder).glob("*_*.yaml")):
            made("apply", "--server-side", "-f", str(file))
    eventually(lambda: made.run("get", "jobsets,trainjobs,trainingruntimes").returncode == 0, why="it serves them")
    return made


@pytest.fixture(scope="module")
def trainer(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trainer's controller as a process, asked by the API server about what is written; its log."""
    layout, folder = Layout.default(), tmp_path_factory.mktemp("trainer")
    ensure_binaries(layout, [PROGRAM], Steps(Console(stderr=True), 1))
    authority, port, health = trustme.CA(), free_port(), free_port()
    certificate, keys = authority.issue_cert("127.0.0.1"), folder / "k8s-webhook-server" / "serving-certs"
    keys.mkdir(parents=True)
    certificate.private_key_pem.write_to_path(keys / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(keys / "tls.crt")
    configuration = {
        "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
        "kind": "Configuration",
        "certManagement": {"enable": False},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "leaderElection": {"leaderElect": False},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port},
    }
    (folder / "config.yaml").write_text(json.dumps(configuration))
    environment = {**os.environ, "KUBECONFIG": str(kubectl.kubeconfig), "TMPDIR": str(folder)}
    log = folder / "log"
    with log.open("wb") as output:
        command = [str(path_of(layout, PROGRAM)), f"--config={folder / 'config.yaml'}"]
        running = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: running.poll() is not None or "Starting workers" in log.read_text(), why="Trainer runs")
        assert running.poll() is None, log.read_text()
        asked = yaml.safe_load((module(TRAINER) / "manifests/base/webhook/manifests.yaml").read_text())
        for one in asked["webhooks"]:
            path = one["clientConfig"].pop("service")["path"]
            bundle = base64.b64encode(authority.cert_pem.bytes()).decode()
            one["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
        kubectl.apply(asked)
        yield log
    finally:
        running.terminate()
        running.wait()


def test_trainer_makes_rendered_jobset_and_reports_its_end(kubectl: Kubectl, trainer: Path) -> None:
    *others, runtime, trainjob = yaml.safe_load_all(render_job(JOB, namespace=None, trainjob=True))
    jobset = list(yaml.safe_load_all(render_job(JOB, namespace=None)))[-1]
    for one in (*others, runtime):
        kubectl.apply(one)
    eventually(lambda: kubectl.run("apply", "--server-side", "-f", "-", stdin=trainjob).returncode == 0, why="accepted")
    made = eventually(lambda: kubectl.get("jobset", NAME), why=trainer.read_text())
    for job in jobset["spec"]["replicatedJobs"]:  # Trainer sets both to the number of pods
        job["template"]["spec"]["completions"] = job["template"]["spec"]["parallelism"]
    assert differences(jobset["spec"], made["spec"]) == []
    assert differences(jobset["metadata"], made["metadata"]) == []
    kubectl.set_status("jobset", NAME, {"conditions": [ENDED]})
    conditions = lambda: (kubectl.get("trainjob", NAME) or {}).get("status", {}).get("conditions", [])  # noqa: E731
    eventually(lambda: any(one["type"] == "Complete" for one in conditions()), why="the TrainJob is complete")


def test_trainer_refuses_trainjob_without_its_runtime(kubectl: Kubectl, trainer: Path) -> None:
    *_, trainjob = yaml.safe_load_all(render_job(JOB, namespace=None, trainjob=True))
    trainjob["spec"]["runtimeRef"]["name"] = trainjob["metadata"]["name"] = "alone"
    refused = kubectl.run("apply", "--server-side", "-f", "-", stdin=trainjob)
    assert "must be created before the TrainJob" in refused.stderr


def differences(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Return where one manifest lacks what another one has, whatever else it has; numbers and their texts are equal."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [line for key, one in wanted.items() for line in differences(one, found.get(key), f"{path}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [line for index, (one, other) in pairs for line in differences(one, other, f"{path}[{index}]")]
    unset = found is None and wanted in ([], 0)  # what Go leaves out
    return [] if unset or str(wanted) == str(found) else [f"{path}: {found!r} instead of {wanted!r}"]
