"""Fixtures of tests on Kubernetes: a cluster, an API server alone, and the images of this project.

A cluster is the one that KUBECONFIG names (its context and server are printed), else hack/local-cluster, which these
fixtures bring up and take down again.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import registry
from tests.support.patience import Patience
from tests.support.shared import shared
from tests.support.tools import LOCAL_CLUSTER, choose_cluster, tool

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "stage2"
NAMED = ("STAGE2_CONTROLLER_IMAGE", "STAGE2_TRAINER_IMAGE")
BUILD_TIMEOUT_S = 7200
"""The first run on a machine builds Kubernetes and the trainer's image. Of no wait: each has a limit of its own."""
JOB_TIMEOUT_S = 900
PRETENDED = "stage2.dev/test"
"""The label of nodes without a kubelet, which tests create: the scheduler would bind any pod to them."""
ON_A_KUBELET = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": PRETENDED, "operator": "DoesNotExist"}]}]
        }
    }
}
"""The affinity of a pod that must run, although other tests create such nodes."""


@dataclass(frozen=True)
class Published:
    """Images that a pod can use, and what helm installs."""

    controller: str
    trainer: str
    chart: Sequence[str]


class LocalCluster:
    """The command hack/local-cluster; its progress goes to the terminal."""

    command = str(LOCAL_CLUSTER)

    def __call__(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run([self.command, *arguments], check=check, text=True, stdout=subprocess.PIPE)

    def up(self, *arguments: str) -> Path:
        """Bring a cluster up, unless it runs already; return its kubeconfig."""
        return self._printed_kubeconfig(self("up", *arguments))

    def running(self) -> Path | None:
        """The running cluster's kubeconfig."""
        status = self("status", check=False)
        return None if status.returncode else self._printed_kubeconfig(status)

    @staticmethod
    def _printed_kubeconfig(result: subprocess.CompletedProcess[str]) -> Path:
        return Path(result.stdout.partition("KUBECONFIG=")[2].splitlines()[0])


@pytest.fixture(scope="session")
def kubectl_on_path() -> None:
    """Where the machine has no kubectl, take the one that hack/local-cluster fetches."""
    if shutil.which("kubectl") is None:
        os.environ["PATH"] += os.pathsep + str(Path(tool("kubectl")).parent)


@pytest.fixture(scope="session")
def local_cluster(kubectl_on_path: None) -> LocalCluster:
    """hack/local-cluster."""
    return LocalCluster()


@pytest.fixture(scope="session")
def root() -> None:
    """Skip where a node cannot be booted."""
    if os.geteuid() != 0:
        pytest.skip("a local cluster needs root (or name a cluster with KUBECONFIG)")


@pytest.fixture(scope="session")
def apiserver(local_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Administrator's kubeconfig of an API server alone: objects live, nothing acts on them. Needs no root."""
    home = str(tmp_path_factory.mktemp("control-plane") / "home")
    try:
        yield local_cluster.up("--control-plane-only", "--dir", home)
    finally:
        local_cluster("down", "--dir", home)


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest, the same in each of its processes."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many nvidia.com/gpu each node of a local cluster has."""
    return 4


@pytest.fixture(scope="session")
def kubeconfig(
    request: pytest.FixtureRequest, local_cluster: LocalCluster, session_folder: Path, gpus: int
) -> Iterator[Path]:
    """Kubeconfig of a whole cluster with nvidia.com/gpu: KUBECONFIG's, else a local one for this session."""
    if os.environ.get("KUBECONFIG"):
        yield _chosen(request, session_folder)
        return
    request.getfixturevalue("root")

    def create() -> list[str | bool]:
        found_running = local_cluster.running() is not None
        booted = local_cluster.up(f"--gpus={gpus}", f"--nodes={os.environ.get('STAGE2_NODES', '1')}")
        local_cluster("enable", "kube-router")  # as on most clusters: jobs must work under their policies
        return [str(booted), found_running]

    def remove(brought: list[str | bool]) -> None:
        if not brought[1]:
            local_cluster("down")

    with shared(session_folder, "cluster", create, remove) as (booted, _):
        yield Path(str(booted))


def _chosen(request: pytest.FixtureRequest, session_folder: Path) -> Path:
    """Return a kubeconfig with the cluster that KUBECONFIG names; the first process of the session says which it is."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def choose() -> str:
        with capture.global_and_fixture_disabled():
            return str(choose_cluster(session_folder))

    with shared(session_folder, "chosen", choose, lambda _: None) as file:
        return Path(file)


@pytest.fixture(scope="session")
def on_local_cluster(kubeconfig: Path, local_cluster: LocalCluster) -> Path:
    """The kubeconfig, where it is the local cluster's; images can be built and loaded there."""
    named = os.environ.get("KUBECONFIG", str(kubeconfig))
    if local_cluster.running() != Path(named):
        pytest.skip("only on a cluster of hack/local-cluster")
    return kubeconfig


@pytest.fixture(scope="session")
def controller_image(request: pytest.FixtureRequest, local_cluster: LocalCluster) -> str:
    """Image of the controller: STAGE2_CONTROLLER_IMAGE, else built and loaded into the local cluster."""
    if named := os.environ.get(NAMED[0]):
        return named
    request.getfixturevalue("on_local_cluster")
    local_cluster("build", "controller")
    return "stage2/controller:dev"


@pytest.fixture(scope="session")
def published(request: pytest.FixtureRequest, local_cluster: LocalCluster, session_folder: Path) -> Iterator[Published]:
    """STAGE2_CONTROLLER_IMAGE, STAGE2_TRAINER_IMAGE and this chart; else all three built here, in a registry."""
    if (controller := os.environ.get(NAMED[0])) and (trainer := os.environ.get(NAMED[1])):
        yield Published(controller, trainer, (str(CHART),))
        return
    request.getfixturevalue("on_local_cluster")
    helm, folder = request.getfixturevalue("helm"), session_folder / "registry"

    def publish(host: str) -> list[str]:
        local_cluster("build")
        subprocess.run([helm, "package", CHART, f"--destination={folder}"], check=True)
        (packed,) = folder.glob("stage2-*.tgz")
        subprocess.run([helm, "push", packed, f"oci://{host}/charts", "--plain-http"], check=True)
        return local_cluster("push", f"{host}/stage2", "--plain-http").stdout.split()

    def start() -> tuple[int, int]:
        return registry.start(tool("docker-registry"), folder)

    with shared(session_folder, "registry", start, lambda started: registry.stop(started[0], folder)) as (_, port):
        host = f"127.0.0.1:{port}"
        with shared(session_folder, "published", lambda: publish(host), lambda _: None) as (controller, trainer):
            yield Published(controller, trainer, (f"oci://{host}/charts/stage2", "--plain-http"))


@pytest.fixture(scope="session")
def installed(kubeconfig: Path, published: Published, helm: str, session_folder: Path) -> Iterator[Path]:
    """The kubeconfig of a cluster on which the published chart is installed, removed at the session's end.

    It fails where a release is installed already: that one is somebody's.
    """
    command = [helm, f"--kubeconfig={kubeconfig}", "--namespace=stage2-system"]
    chosen = {
        "image.controller": published.controller,
        "image.trainer": published.trainer,
        "controller.progressSeconds": "1",  # a job of these tests trains for seconds, and is seen while it does
    }
    values = [f"--set={name}={value}" for name, value in chosen.items()]
    install = ["install", "stage2", *published.chart, "--create-namespace"]

    def create() -> None:
        subprocess.run([*command, *install, "--wait", "--timeout=10m", *values], check=True)

    def remove(_: None) -> None:
        subprocess.run([*command, "uninstall", "stage2", "--wait", "--ignore-not-found"], check=True)

    with shared(session_folder, "release", create, remove):
        yield kubeconfig


@dataclass(frozen=True)
class Ran:
    """A job that has ended: its last state, and the log of its learner."""

    job: Mapping[str, Any]
    log: str

    def records(self, event: str) -> list[dict[str, Any]]:
        """The learner's JSON lines of one kind, in order."""
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith('{"event"')]
        return [line for line in lines if line["event"] == event]


def whole_record(found: Sequence[dict[str, Any]], *, merge: str | None) -> dict[str, Any]:
    """The reproducibility record of a run that merges there, after a look at what it says of every example.

    A learner that had to be started again, as where its servers came late, wrote the same record at each start.
    """
    record, *others = found
    assert all(other == record for other in others)
    how = {"merge": merge, "transport": merge and "tcp"}
    reason = record["sync"].pop("merge_reason")
    assert record["sync"] == {"requested": "full", "effective": "full", **how}
    assert bool(reason) is bool(merge)
    assert record["rollout_seed"] == 17
    assert len(record["config_sha256"]) == len(record["dataset"]["sha256"]) == 64
    assert all(record["versions"][name] for name in ("stage2", "torch", "transformers", "peft", "vllm", "python"))
    return record


def kubectl(kubeconfig: Path, *arguments: str, stdin: str | None = None) -> str:
    """Run kubectl in the namespace default; return what it printed."""
    command = ["kubectl", f"--kubeconfig={kubeconfig}", "--namespace=default", *arguments]
    return subprocess.run(command, check=True, text=True, input=stdin, stdout=subprocess.PIPE).stdout


@contextmanager
def example_run(
    kubeconfig: Path,
    name: str,
    change: Callable[[dict[str, Any]], None],
    meanwhile: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Iterator[Ran]:
    """Run an example job, whose training configuration `change` makes smaller, to its end; remove it afterwards.

    meanwhile: called with each state of the job that is seen.
    """
    manifest = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    change(manifest["spec"]["config"])
    kubectl(kubeconfig, "apply", "--filename=-", stdin=json.dumps(manifest))
    patience = Patience(JOB_TIMEOUT_S)
    try:
        while True:
            job = json.loads(kubectl(kubeconfig, "get", "rmj", name, "--output=json"))
            if job.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                break
            meanwhile(job)
            assert not patience.ended(), job
            time.sleep(1)
        yield Ran(job, kubectl(kubeconfig, "logs", f"job/{name}-learner", "--tail=-1"))
    finally:
        kubectl(kubeconfig, "delete", "rmj", name, "--ignore-not-found", "--wait")
