"""The same pods through JobSet's own controller (`hack/local-cluster/local-cluster enable jobset` installs it)."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import IO, cast
from urllib.request import Request, urlopen

from bench.cluster import Object, job, kubectl
from kubernetes.aio import client, config

from stage2_api.parsing import parse_job
from stage2_controller.children.build import static_children

NAMESPACE = "jobset-system"
_READER = "stage2-bench-reads-jobset"


def jobset(index: int, namespace: str) -> Object:
    """A JobSet of the pods of `cluster.job(index)`: the learner follows when the servers are ready, as with us."""
    children = {
        child["kind"]: child for child in static_children(parse_job(job(index, namespace)), content={"token": "t"})
    }
    rollout, learner = (children[kind]["spec"]["template"] for kind in ("Deployment", "Job"))
    after = [{"name": "rollout", "status": "Ready"}]
    success = {"operator": "All", "targetReplicatedJobs": ["learner"]}
    replicated = [_replicated("rollout", rollout), _replicated("learner", learner) | {"dependsOn": after}]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": f"job-{index}", "namespace": namespace},
        "spec": {"replicatedJobs": replicated, "successPolicy": success},
    }


def child(index: int) -> str:
    """The last child that exists before any server answers."""
    return f"job-{index}-rollout-0"


@contextlib.asynccontextmanager
async def creator() -> AsyncIterator[Callable[[Object], Awaitable[object]]]:
    """A function that creates one JobSet."""
    configuration = client.Configuration()
    named = os.environ["KUBECONFIG"]
    await config.load_kube_config(named, client_configuration=configuration)
    async with client.ApiClient(configuration) as connection:
        api = client.CustomObjectsApi(connection)

        def create(body: Object) -> Awaitable[object]:
            group, version = body["apiVersion"].split("/")
            made: Awaitable[object] = api.create_namespaced_custom_object(
                group, version, body["metadata"]["namespace"], "jobsets", body
            )
            return made

        yield create


def _replicated(name: str, template: Object) -> Object:
    pod = {"spec": {**template["spec"], "restartPolicy": "Never"}}
    return {"name": name, "replicas": 1, "template": {"spec": {"parallelism": 1, "completions": 1, "template": pod}}}


@contextlib.contextmanager
def figures() -> Iterator[Callable[[], dict[str, float]]]:
    """A function that reads the metrics of JobSet's controller, whatever their labels summed by name."""
    subject = f"--serviceaccount={NAMESPACE}:jobset-controller-manager"
    kubectl("delete", "clusterrolebinding", _READER)  # of a run that was killed
    kubectl("create", "clusterrolebinding", _READER, "--clusterrole=jobset-metrics-reader", subject)
    token = kubectl("-n", NAMESPACE, "create", "token", "jobset-controller-manager").strip()
    forward = ["kubectl", "-n", NAMESPACE, "port-forward", "deployment/jobset-controller-manager", ":8443"]
    process = subprocess.Popen(forward, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        port = int(re.findall(r":(\d+) ->", cast(IO[str], process.stdout).readline())[0])
        request = Request(f"https://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"})
        trust = ssl._create_unverified_context()  # it signs its own certificate
        yield lambda: summed(urlopen(request, context=trust).read().decode())
    finally:
        process.kill()
        process.wait()
        kubectl("delete", "clusterrolebinding", _READER)


def summed(text: str) -> dict[str, float]:
    """Prometheus' text as one number for each name."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found
