"""Queues of a test, and jobs in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import yaml

from tests.cluster.controller.conftest import HERE, Kubectl, Kubelet, Object, eventually, job
from tests.support.clusters import ROOT

EXAMPLE = ROOT / "examples" / "queue-kueue.yaml"
QUEUE = "kueue.x-k8s.io/queue-name"


@contextmanager
def queue(kubectl: Kubectl, own: str, name: str = "team", *, gpus: int = 4, **flavor: Any) -> Iterator[None]:
    """A queue with a quota of GPUs; its objects are called `own`, and `flavor` changes its flavor."""
    made = _example(kubectl.namespace, own, name, gpus=gpus, **flavor)
    try:
        for one in made:
            eventually(partial(accepted, kubectl, one), why="Kueue answers")
        yield
    finally:
        kubectl("delete", "rmj", "--all", "--timeout=600s")
        for one in reversed(made):
            kubectl("delete", one["kind"], one["metadata"]["name"], "--timeout=600s")


def accepted(kubectl: Kubectl, one: Object) -> bool:
    """Whether the API server takes an object."""
    return kubectl.run("apply", "-f", "-", stdin=one).returncode == 0


def _example(namespace: str, own: str, name: str, *, gpus: int, **more: Any) -> list[Object]:
    """The example's objects for one test: under its names, for its nodes, with so many GPUs."""
    topology, flavor, cluster_queue, local_queue = yaml.safe_load_all(EXAMPLE.read_text())
    for made in (topology, flavor, cluster_queue):
        made["metadata"]["name"] = own
    local_queue["metadata"]["name"] = name
    flavor["spec"] |= {"topologyName": own, "nodeLabels": HERE, **more}
    flavor["spec"] = {key: value for key, value in flavor["spec"].items() if value is not None}
    (offered,) = cluster_queue["spec"]["resourceGroups"][0]["flavors"]
    offered["name"] = local_queue["spec"]["clusterQueue"] = own
    local_queue["metadata"]["namespace"] = namespace
    (offered_gpus,) = [one for one in offered["resources"] if one["name"] == "nvidia.com/gpu"]
    offered_gpus["nominalQuota"] = gpus
    return [topology, flavor, cluster_queue, local_queue]


def apply_queued(
    kubectl: Kubectl, name: str, *, priority_class: str | None = None, queue_name: str = "team", mode: str = "Reserve"
) -> None:
    """Apply a job in a queue."""
    placement: Object = {"nodeSelector": HERE, "mode": mode}
    if priority_class:
        placement["priorityClassName"] = priority_class
    made = job(name, placement=placement)
    made["metadata"]["labels"] = {QUEUE: queue_name}
    kubectl.apply(made)


def until_running(kubectl: Kubectl, kubelet: Kubelet, name: str) -> None:
    """Wait until a job is admitted; play its pods until it runs."""
    why = f"{name} is admitted: {quota_message(kubectl, name)}"
    eventually(lambda: kubelet.pod(name, "rollout"), why=why)
    kubelet.job_runs(name)


def quota_message(kubectl: Kubectl, name: str) -> str:
    """The message of a job's condition QuotaReserved."""
    conditions = (kubectl.get("rmj", name) or {}).get("status", {}).get("conditions", [])
    return next((str(item["message"]) for item in conditions if item["type"] == "QuotaReserved"), "")
