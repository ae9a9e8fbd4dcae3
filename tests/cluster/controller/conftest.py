"""A controller under test: its own namespace, the chart's own least privileges, and a hand that plays the kubelet.

Jobs ask for a node that only exists as an object, so that no test depends on what a cluster's own nodes have.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from kubernetes.dynamic.exceptions import NotFoundError

from tests.cluster import objects
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.support import forked
from tests.support.clusters import PRETENDED
from tests.support.patience import Patience
from tests.support.shared import shared
from tests.unit.api.wrong_jobs import good_job

ROOT = Path(__file__).parents[3]
CRD = ROOT / "crds" / "rolloutmatchingjob.yaml"
KNOWN_KEYS = ROOT / "crds" / "known-keys.yaml"
CRD_NAME = "rolloutmatchingjobs.stage2.dev"
BINDING = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicyBinding",
    "metadata": {"name": CRD_NAME},
    "spec": {
        "policyName": CRD_NAME,
        "validationActions": ["Deny"],
        "matchResources": {
            "namespaceSelector": {"matchExpressions": [{"key": "stage2.dev/unguarded", "operator": "DoesNotExist"}]}
        },
    },
}
"""As the chart has it, but for namespaces in which a test has it not."""
MISSPELT = {
    "apiVersion": "stage2.dev/v1alpha1",
    "kind": "RolloutMatchingJob",
    "metadata": {"name": "misspelt"},
    "spec": {**good_job()["spec"], "lerner": {}},
}
HERE = {PRETENDED: f"node-of-{os.environ.get('PYTEST_XDIST_WORKER', 'a-test')}"}
"""A label of the nodes of one test at a time: processes that test side by side have one each."""
SERVERS_ADDRESS = "192.0.2.7"
"""Of every rollout pod without a kubelet: of a block that nobody has (RFC 5737)."""
WAIT_S = 120
"""No promise: what a test waits for comes within seconds, and late on a machine that is slow or busy."""
POLL_S = 0.1
ANY_NAMESPACE = "stage2-test-any"
Object = dict[str, Any]


@dataclass(frozen=True)
class Kubectl:
    """kubectl as the cluster's administrator, in the namespace of the test."""

    kubeconfig: Path
    namespace: str = "default"

    def run(self, *arguments: str, stdin: object = None) -> subprocess.CompletedProcess[str]:
        """Runs kubectl; `stdin` is written as JSON."""
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}", *arguments]
        text = None if stdin is None else json.dumps(stdin)
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    def __call__(self, *arguments: str, stdin: object = None, check: bool = True) -> str:
        """Runs kubectl and returns what it prints; raises with what it complains about."""
        done = self.run(*arguments, stdin=stdin)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def get(self, kind: str, name: str) -> Object | None:
        """The object, or None."""
        return objects.get(self.kubeconfig, self.namespace, kind, name)

    def list(self, *kinds: str, selector: str = "") -> list[Object]:
        """All objects of some kinds that have these labels, the oldest of a kind first."""
        return [one for kind in kinds for one in objects.listed(self.kubeconfig, self.namespace, kind, selector)]

    def apply(self, body: Object) -> None:
        """Server-side apply as a person."""
        self("apply", "--server-side", "-f", "-", stdin=body)

    def set_status(self, kind: str, name: str, status: Object) -> None:
        """Writes a status as the kubelet would."""
        objects.merge_status(self.kubeconfig, self.namespace, kind, name, status)


def eventually(what: Callable[[], Any], *, why: str, timeout_s: float = WAIT_S) -> Any:
    """The first true value of `what()`; fails with `why` if there is none in time."""
    patience = Patience(timeout_s)
    while not patience.ended():
        if value := what():
            return value
        time.sleep(POLL_S)
    pytest.fail(f"not within {patience.waited_s:.0f} s: {why}")


@pytest.fixture(scope="session")
def definition_is_ours(kubeconfig: Path, session_folder: Path) -> Iterator[bool]:
    """Give the cluster the definition; whether it had none, so that it goes at the end and tests may replace it."""
    kubectl = Kubectl(kubeconfig)

    def create() -> bool:
        ours = kubectl.get("crd", CRD_NAME) is None
        define(kubectl)
        return ours

    def remove(ours: bool) -> None:
        if ours:
            undefine(kubectl)

    with shared(session_folder, "definition", create, remove) as ours:
        yield ours


@pytest.fixture(scope="session")
def admin(kubeconfig: Path, definition_is_ours: bool) -> Kubectl:
    """kubectl on a cluster that has the definition."""
    return Kubectl(kubeconfig)


def define(kubectl: Kubectl) -> None:
    """Give the cluster today's definition, with the policy that refuses unknown keys."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    eventually(lambda: kubectl.run("get", "rmj").returncode == 0, why="the API server serves the definition")
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(KNOWN_KEYS))
    kubectl.apply(BINDING)
    eventually(lambda: _refused(kubectl, MISSPELT), why="the API server knows the keys of a job")


def undefine(kubectl: Kubectl) -> None:
    """Take definition and policy from the cluster, and with them all jobs."""
    kinds = "crd,validatingadmissionpolicy,validatingadmissionpolicybinding"
    kubectl("delete", kinds, CRD_NAME, "--ignore-not-found")


def _refused(kubectl: Kubectl, body: Object) -> bool:
    return kubectl.run("create", "--dry-run=server", "-f", "-", stdin=body).returncode != 0


@contextmanager
def namespace(admin: Kubectl) -> Iterator[Kubectl]:
    """A namespace that demands the restricted Pod Security Standard, and goes in the end: kubectl in it."""
    name = f"stage2-test-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    made = Kubectl(admin.kubeconfig, name)
    eventually(lambda: made.get("serviceaccount", "default"), why="pods of the namespace may be made")
    yield made
    admin("delete", "namespace", name, "--wait=false")
    granted = [f"{name}.stage2{role}" for role in ("", "-view", "-edit", "-admin")]
    admin("delete", "clusterrole,clusterrolebinding", *granted, "--ignore-not-found")


@pytest.fixture
def kubectl(admin: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace of its own."""
    with namespace(admin) as made:
        yield made


@pytest.fixture
def nodes(kubectl: Kubectl) -> Iterator[FakeNodes]:
    """The nodes of the test: none yet."""
    made = FakeNodes(kubectl)
    yield made
    made.close()


@pytest.fixture
def node(kubectl: Kubectl, nodes: FakeNodes) -> str:
    """A node with GPUs for four jobs."""
    return nodes.add(f"{kubectl.namespace}-node", gpus=16, labels=HERE)


class Controller:
    """`python -m stage2_controller` for one namespace, with no more rights than the chart gives."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path, *options: str) -> None:
        self._options = options
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self.log = log
        self.environment: dict[str, str] = {}  # beside the test's own, from the first instruction on
        self.exit_code: int | None = None  # of the last one that was stopped
        self._process: forked.Forked | subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it and waits until it works, or stands by."""
        command = [sys.executable, "-m", "stage2_controller", "--namespace", self._namespace, *self._options]
        command += ["--image", "stage2/trainer:test"]
        environment = {**os.environ, **self.environment, "KUBECONFIG": str(self._kubeconfig)}
        before = self._starts()
        with self.log.open("ab") as log:
            self._process = (
                subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                if self.environment
                else forked.start(command, imports=forked.CONTROLLER, env=environment, stdout=log)
            )
        eventually(lambda: self._starts() > before, why=f"controller ready; {self.text()[-2000:]}")

    def _starts(self) -> int:
        text = self.text()
        return text.count("ready: ") + text.count("standing by for the Lease")

    def stop(self, *, kill: bool = False) -> None:
        """Ends it: politely, or as a lost node would."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        eventually(self.ended, why="the controller ends")
        self.exit_code = self._process.returncode
        self._process = None

    def send(self, sig: signal.Signals) -> None:
        """Signals it: SIGSTOP makes it stand still."""
        assert self._process is not None
        self._process.send_signal(sig)

    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process is not None and self._process.poll() is not None

    def memory_mb(self) -> float:
        """What it takes of the machine's memory now, in MB."""
        assert self._process is not None
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def text(self) -> str:
        """Everything it has logged."""
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def rights(kubectl: Kubectl, helm: str, tmp_path: Path) -> Path:
    """A kubeconfig with the rights of the chart's service account."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(chart_rights(kubectl, helm)))
    return kubeconfig


@pytest.fixture
def controller(kubectl: Kubectl, node: str, rights: Path, tmp_path: Path) -> Iterator[Controller]:
    """A controller that runs with the rights of the chart's service account, and one node for its jobs."""
    running = Controller(rights, kubectl.namespace, tmp_path / "controller.log", "--progress-seconds=2")
    running.start()
    yield running
    running.stop()
    assert "Traceback" not in running.text(), running.text()


def chart_rights(kubectl: Kubectl, helm: str, *more: str) -> Object:
    """A kubeconfig with a token of the chart's service account, installed for this namespace alone."""
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    rendered = _rendered(helm, more).replace(ANY_NAMESPACE, kubectl.namespace)
    granted = [one for one in yaml.safe_load_all(rendered) if one and one["kind"] in kinds]
    kubectl.apply({"apiVersion": "v1", "kind": "List", "items": granted})
    return rights_of_the_release(kubectl)


@functools.cache
def _rendered(helm: str, more: tuple[str, ...]) -> str:
    """The chart's objects for ANY_NAMESPACE; they are the same for any other."""
    values = f'image.repository="registry.example/team",controller.namespaces=["{ANY_NAMESPACE}"]'
    command = [helm, "template", "stage2", str(ROOT / "charts" / "stage2"), "--namespace", ANY_NAMESPACE]
    return subprocess.run(
        [*command, "--set-json", ",".join((values, *more))], capture_output=True, text=True, check=True
    ).stdout


def rights_of_the_release(kubectl: Kubectl) -> Object:
    """A kubeconfig with a token of the service account that a release has in this namespace."""
    config, token = _whole(kubectl.kubeconfig), kubectl("create", "token", "stage2").strip()
    return {**config, "users": [{"name": user["name"], "user": {"token": token}} for user in config["users"]]}


@functools.cache
def _whole(kubeconfig: Path) -> Object:
    """A kubeconfig's current context, with the contents of the files that it names."""
    config: Object = json.loads(Kubectl(kubeconfig)("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    return config


def job(name: str = "job-3v1", **spec: Any) -> Object:
    """A valid job for the nodes of its test."""
    config = {
        "model": {"model": "/data/model"},
        "global_max_length": 2048,
        "training": {"output_dir": "/data/output", "max_steps": 10},
        "custom": {
            "train_jsonl": "/data/train.jsonl",
            "extra": {"rollout_matching": {"rollout_backend": "vllm", "vllm": {"mode": "server"}}},
        },
    }
    written = {
        "rollout": {"servers": 3},
        "learner": {"gpus": 1, "backoffLimit": 1},
        "placement": {"nodeSelector": HERE},
        "volumes": [{"name": "data", "mountPath": "/data", "emptyDir": {}}],
        "config": config,
    }
    return {
        "apiVersion": "stage2.dev/v1alpha1",
        "kind": "RolloutMatchingJob",
        "metadata": {"name": name},
        "spec": {**written, **spec},
    }


class Kubelet:
    """Writes the pod statuses that a kubelet would write."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl

    def pod(self, job_name: str, role: str) -> Object | None:
        """The newest pod of a role."""
        selector = f"stage2.dev/job={job_name},stage2.dev/role={role}"
        pods = self._kubectl.list("pods", selector=selector)
        return pods[-1] if pods else None

    def servers_answer(self, job_name: str, ready: bool = True, *, role: str = "rollout") -> None:
        """All containers of the rollout pod run, and answer or not. role: with more labels, of one among several."""
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        conditions = [{"type": "Ready", "status": str(ready)}, {"type": "PodScheduled", "status": "True"}]

        def reported(pod: Object) -> Object:
            statuses = [self._status(item["name"], state, ready=ready) for item in pod["spec"]["containers"]]
            address = {"podIP": SERVERS_ADDRESS, "podIPs": [{"ip": SERVERS_ADDRESS}]}
            return {"phase": "Running", "conditions": conditions, "containerStatuses": statuses, **address}

        self._write_status(job_name, role, reported)

    def learner_waits(self, job_name: str) -> None:
        """The first container of the learner's pod waits for the servers."""
        first = self._status("wait-for-servers", {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, ready=False)
        then = self._status("learner", {"waiting": {"reason": "PodInitializing"}}, ready=False)
        conditions = [{"type": "PodScheduled", "status": "True"}]
        reported = {"phase": "Pending", "conditions": conditions, "initContainerStatuses": [first]}
        self._write_status(job_name, "learner", lambda _: {**reported, "containerStatuses": [then]})

    def learner_runs(self, job_name: str, report: str = "") -> None:
        """The learner's container runs; `report`: what it reported before it was started again."""
        status = self._status("learner", {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, ready=True)
        if report:
            status["lastState"] = {"terminated": {"exitCode": 75, "message": report}}
        conditions = [{"type": "PodScheduled", "status": "True"}]
        done = {
            "terminated": {"exitCode": 0, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:01Z"}
        }

        def reported(pod: Object) -> Object:
            first = [self._status(item["name"], done, ready=True) for item in pod["spec"].get("initContainers", [])]
            begun = {"phase": "Running", "conditions": conditions, "initContainerStatuses": first}
            return {**begun, "containerStatuses": [status]}

        self._write_status(job_name, "learner", reported)

    def job_runs(self, job_name: str) -> None:
        """Servers answer and the learner runs: wait until the job's phase is Running."""
        self.servers_answer(job_name)
        self.learner_runs(job_name)
        eventually(lambda: phase(self._kubectl, job_name) == "Running", why=f"{job_name} runs")

    def learner_ends(self, job_name: str, exit_code: int, message: str = "") -> None:
        """The learner's container ended."""
        times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:01:00Z"}
        ended = {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed", "message": message, **times}
        status = self._status("learner", {"terminated": ended}, ready=False)
        phase = "Failed" if exit_code else "Succeeded"
        self._write_status(
            job_name, "learner", lambda _: {"phase": phase, "conditions": [], "containerStatuses": [status]}
        )

    def _write_status(self, job_name: str, role: str, reported: Callable[[Object], Object]) -> None:
        """Write a status of the newest pod of a role once it has a node: before that there is no kubelet to do it.

        A pod that is on its way out may be gone meanwhile: then it is the next one's.
        """

        def written() -> bool:
            pod = self.pod(job_name, role)
            if not pod or not pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
                return False
            try:
                self._kubectl.set_status("pod", pod["metadata"]["name"], reported(pod))
            except NotFoundError:
                return False
            return True

        eventually(written, why=f"a {role} pod has a node")

    @staticmethod
    def _status(name: str, state: Object, *, ready: bool) -> Object:
        return {"name": name, "image": "x", "imageID": "x", "ready": ready, "restartCount": 0, "state": state}


@pytest.fixture
def kubelet(kubectl: Kubectl) -> Kubelet:
    """The hand that plays the kubelet."""
    return Kubelet(kubectl)


def phase(kubectl: Kubectl, name: str) -> str | None:
    """The job's phase."""
    found: str | None = (kubectl.get("rmj", name) or {}).get("status", {}).get("phase")
    return found


def reason(kubectl: Kubectl, name: str, condition: str) -> str | None:
    """The reason of one of the job's conditions."""
    conditions = (kubectl.get("rmj", name) or {}).get("status", {}).get("conditions", [])
    return next((item["reason"] for item in conditions if item["type"] == condition), None)
