"""What the fault run pretends with: kubelets for nodes that are objects only, and a `stage2` for pods that are real."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.cluster import objects
from tests.cluster.controller.conftest import Kubectl

Pod = Mapping[str, Any]
GPU = "nvidia.com/gpu"
_ENDED = ("Succeeded", "Failed")
_BEAT_S = 0.7

# In a ConfigMap, before every other `stage2` on PATH: servers answer, a learner works for a while and ends as asked.
SCRIPT = """#!/usr/bin/env python3
import http.server, os, signal, ssl, sys, time

signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if sys.argv[1] == "serve":
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(os.environ["STAGE2_TLS_CERT_FILE"], os.environ["STAGE2_TLS_KEY_FILE"])
    server = http.server.ThreadingHTTPServer(("", 8000 + int(sys.argv[-1])), Healthy)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
if sys.argv[1] == "wait":
    sys.exit(0)
time.sleep(float(os.environ["PRETENDED_S"]))
sys.exit(int(os.environ["PRETENDED_EXIT"]))
"""
CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "pretended"}, "data": {"stage2": SCRIPT}}


def template(container: str, *, seconds: float = 0.0, exit_code: int = 0) -> dict[str, Any]:
    """A pod template that makes `container` pretend."""
    reported = {
        "PATH": "/pretended:/opt/stage2/bin:/usr/local/bin:/usr/bin:/bin",
        "PRETENDED_S": str(seconds),
        "PRETENDED_EXIT": str(exit_code),
    }
    changed = {
        "name": container,
        "env": [{"name": key, "value": value} for key, value in reported.items()],
        "volumeMounts": [{"name": "pretended", "mountPath": "/pretended"}],
    }
    waits = {"initContainers": [{**changed, "name": "wait-for-servers"}]} if container == "learner" else {}
    volume = {"name": "pretended", "configMap": {"name": "pretended", "defaultMode": 0o555}}
    return {"spec": {"containers": [changed], **waits, "volumes": [volume]}}


def gpus_of(pod: Pod) -> int:
    """The GPUs that a pod holds on its node."""
    return sum(int(item["resources"].get("limits", {}).get(GPU, 0)) for item in pod["spec"]["containers"])


@dataclass
class Kubelets:
    """Starts the containers of every pod bound to these nodes, lets learners work, and ends them as they are fated.

    A learner's work counts over all its pods, as checkpoints make it. All pods of the namespace are watched for one
    more thing: that no node ever holds, or was promised, more GPUs than it has.
    """

    kubectl: Kubectl
    nodes: Mapping[str, int]  # with their GPUs; those that have a kubelet of their own included
    pretended: Set[str]  # those that have none
    fates: Mapping[str, int]  # the exit code of each job's learner
    work_s: float  # of each learner
    durations: Mapping[str, float] = field(default_factory=dict)  # of some jobs' learners, in place of that
    over_booked: list[str] = field(default_factory=list)
    _done_s: Counter[str] = field(default_factory=Counter)
    _seen: dict[str, float] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _broken: list[Exception] = field(default_factory=list)

    def __enter__(self) -> "Kubelets":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        assert not self._broken, self._broken

    def alive(self) -> bool:
        """Whether it still plays."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(_BEAT_S):
                with suppress(*objects.FAILURES):  # an API server that was killed is asked again
                    self._look(self.kubectl.list("pods", "deployments"))
        except Exception as error:  # reported by __exit__: a thread's own end is easily missed
            self._broken.append(error)
            raise

    def _look(self, items: list[Pod]) -> None:
        pods = [item for item in items if item["kind"] == "Pod" and item["spec"].get("nodeName")]
        live = [pod for pod in pods if pod["status"].get("phase") not in _ENDED]
        held: Counter[str] = Counter()
        promised: Counter[str] = Counter()
        for pod in live:
            held[pod["spec"]["nodeName"]] += gpus_of(pod)
        for item in items:
            if item["kind"] == "Deployment":
                servers = gpus_of(item["spec"]["template"])
                if node := item["metadata"]["annotations"].get("stage2.dev/node"):  # else it waits for one
                    promised[node] += servers + 1
        for what, counted in (("held", held), ("promised", promised)):
            for node, gpus in counted.items():
                if gpus > self.nodes[node]:
                    self.over_booked.append(f"{node}: {gpus} {what} of {self.nodes[node]}")
        for pod in live:
            if pod["spec"]["nodeName"] in self.pretended and "deletionTimestamp" not in pod["metadata"]:
                self._live(pod)

    def _live(self, pod: Pod) -> None:
        uid, labels = pod["metadata"]["uid"], pod["metadata"]["labels"]
        if labels["stage2.dev/role"] == "rollout":
            self._write_status(pod, running=True)
            return
        now, name = time.monotonic(), labels["stage2.dev/job"]
        self._done_s[name] += now - self._seen.get(uid, now)
        self._seen[uid] = now
        done = self._done_s[name] >= self.durations.get(name, self.work_s)
        self._write_status(pod, running=not done, exit_code=self.fates[name] if done else 0)

    def _write_status(self, pod: Pod, *, running: bool, exit_code: int = 0) -> None:
        before = {item["name"]: item for item in pod["status"].get("containerStatuses", [])}
        if running and before and all("running" in item["state"] for item in before.values()):
            return
        ended = {"exitCode": exit_code, "reason": "Completed", "message": "pretended"}
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}} if running else {"terminated": ended}
        statuses = [
            {
                "name": item["name"],
                "image": "x",
                "imageID": "x",
                "ready": running,
                "restartCount": before.get(item["name"], {}).get("restartCount", 0),
                "state": state,
            }
            for item in pod["spec"]["containers"]
        ]
        phase = "Running" if running else ("Failed" if exit_code else "Succeeded")
        with suppress(*objects.FAILURES):  # it may be gone by now
            self.kubectl.set_status("pod", pod["metadata"]["name"], {"phase": phase, "containerStatuses": statuses})
