"""The set-up of a benchmark of the controller: a node without a kubelet, a temporary namespace, a watch, a job."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

NODE = "stage2-bench"
Object = dict[str, Any]


@dataclass
class Watch:
    """When each object of a kind in a namespace was first seen, by name."""

    namespace: str
    kind: str = "deployments"
    seen: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> Watch:
        columns = ["-o", "custom-columns=NAME:.metadata.name", "--no-headers"]
        command = ["kubectl", "-n", self.namespace, "get", self.kind, "--watch", *columns]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def all(self, count: int, timeout_s: float) -> dict[str, float]:
        """The times, once `count` are there. Raises TimeoutError."""
        patience = threading.Timer(timeout_s, self.process.kill)  # no line may ever come
        patience.start()
        try:
            for line in self.process.stdout or ():
                self.seen.setdefault(line.strip(), time.monotonic())
                if len(self.seen) >= count:
                    return self.seen
        finally:
            patience.cancel()
        raise TimeoutError(f"{len(self.seen)} of {count} {self.kind}")


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """A namespace of its own, gone with all that is in it before the next run starts."""
    name = f"stage2-bench-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    try:
        yield name
    finally:
        clear(name)
        kubectl("delete", "namespace", name, "--wait=false")
        until(lambda: clear(name) and not kubectl("get", "namespace", name, "--ignore-not-found"), timeout_s=300)


def clear(name: str) -> bool:
    """Deletes all jobs and pods of a namespace, by a request for each kind; False where that was not done in time."""
    for path in _CLEARED:
        where = path.format(namespace=name)
        try:
            kubectl("delete", "--raw", f"{where}?gracePeriodSeconds=0&propagationPolicy=Background")
        except RuntimeError:  # the API server gives one request a minute, and ten thousand pods may take longer
            return False
    return True


_CLEARED = (
    "/apis/stage2.dev/v1alpha1/namespaces/{namespace}/rolloutmatchingjobs",
    "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets",
    "/apis/apps/v1/namespaces/{namespace}/deployments",
    "/apis/apps/v1/namespaces/{namespace}/replicasets",
    "/apis/batch/v1/namespaces/{namespace}/jobs",
    "/api/v1/namespaces/{namespace}/pods",
)


@contextlib.contextmanager
def node(*, gpus: int) -> Iterator[None]:
    """One large node without a kubelet, ready for as long as the benchmark runs."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "labels": {"stage2.dev/bench": "true"}},
        "spec": {"taints": [{"key": "stage2.dev/bench", "effect": "NoSchedule"}]},
    }
    kubectl("apply", "-f", "-", stdin=manifest)
    amounts = {"cpu": "100k", "memory": "1Pi", "pods": "100k", "nvidia.com/gpu": str(gpus)}
    condition = {"type": "Ready", "status": "True", "reason": "Bench", "message": "no kubelet"}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [condition]}
    kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    beat = subprocess.Popen([sys.executable, "-c", _BEAT, NODE])
    try:
        yield
    finally:
        beat.kill()
        beat.wait()
        kubectl("delete", "node", NODE, "--wait=false")


_BEAT = """
import datetime, json, subprocess, sys, time
while True:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": sys.argv[1], "leaseDurationSeconds": 40, "renewTime": now}
    meta = {"name": sys.argv[1], "namespace": "kube-node-lease"}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec}
    command = ["kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-"]
    subprocess.run(command, input=json.dumps(lease), text=True, capture_output=True)
    time.sleep(8)
"""


def job(index: int, namespace_name: str) -> Object:
    """A job with three servers and a learner, for the benchmark's node."""
    matching = {"rollout_backend": "vllm", "vllm": {"mode": "server"}}
    config = {
        "model": {"model": "/data/model"},
        "global_max_length": 2048,
        "training": {"output_dir": "/data/output", "max_steps": 10},
        "custom": {"train_jsonl": "/data/train.jsonl", "extra": {"rollout_matching": matching}},
    }
    return {
        "apiVersion": "stage2.dev/v1alpha1",
        "kind": "RolloutMatchingJob",
        "metadata": {"name": f"job-{index}", "namespace": namespace_name},
        "spec": {
            "rollout": {"servers": 3},
            "learner": {"gpus": 1},
            "placement": {
                "nodeSelector": {"stage2.dev/bench": "true"},
                "tolerations": [{"key": "stage2.dev/bench", "operator": "Exists"}],
            },
            "volumes": [{"name": "data", "mountPath": "/data", "emptyDir": {}}],
            "config": config,
        },
    }


_ABSENT = ("NotFound", "not found", "could not find the requested resource")


def kubectl(*arguments: str, stdin: object = None) -> str:
    """Runs kubectl; what it prints."""
    text = None if stdin is None else json.dumps(stdin)
    done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode and not any(text in done.stderr for text in _ABSENT):
        raise RuntimeError(done.stderr)
    return done.stdout


def until(what: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Waits for a true value; raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.2)
