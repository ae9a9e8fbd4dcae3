"""Nodes and foreign pods as the API server holds them, for tests of placement."""

from itertools import count
from typing import Any

from stage2_controller.job import names
from stage2_controller.job.names import Key
from stage2_controller.place.capacity import Capacity
from stage2_controller.place.node_fit import Need, NodeInfo, PodNeed
from tests.unit.controller import builders as b

Object = dict[str, Any]
KEY = Key("team-a", "job-3v1")
OTHER = Key("team-a", "other")
GPU = "nvidia.com/gpu"
FOUR = Need((PodNeed("rollout", {GPU: 3, "pods": 1}), PodNeed("learner", {GPU: 1, "pods": 1})), gpu_resource=GPU)
"""Three servers and a learner, of one GPU each."""
_uids = count()


def node(name: str = b.NODE, gpus: int = 4, **spec: Any) -> Object:
    """A ready node with GPUs, 32 cores and 256 GiB."""
    ready = "False" if spec.pop("not_ready", False) else "True"
    labels = {"kubernetes.io/hostname": name, **spec.pop("labels", {})}
    allocatable = {"nvidia.com/gpu": str(gpus), "cpu": "32", "memory": "256Gi", "pods": "110", **spec.pop("has", {})}
    return {
        "metadata": {"name": name, "uid": f"uid-of-{name}", "labels": labels, "resourceVersion": "1"},
        "spec": spec,
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]},
    }


def foreign(on: str = b.NODE, *, gpus: int = 0, cpu: str = "0", priority: int = 0, phase: str = "Running") -> Object:
    """A pod of somebody else."""
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"cpu": cpu}}
    return {
        "metadata": {"name": "x", "namespace": "team-x", "uid": f"uid-{next(_uids)}", "resourceVersion": "1"},
        "spec": {"nodeName": on, "priority": priority, "containers": [{"name": "x", "resources": resources}]},
        "status": {"phase": phase},
    }


def bound(role: str, gpus: int, *, on: str = b.NODE, job: str = "job-3v1") -> Object:
    """A pod of a job that takes GPUs of a node."""
    made = foreign(on, gpus=gpus)
    made["metadata"] |= {
        "namespace": "team-a",
        "labels": {names.LABEL_ROLE: role},
        "annotations": {names.ANNOTATION_JOB: job},
    }
    return made


def capacity(*objects: Object) -> Capacity:
    """An account of these nodes and pods."""
    made = Capacity(clock=lambda: 0.0)
    for body in objects:
        made.put("Pod" if "containers" in body["spec"] else "Node", body)
    return made


def seen(made: Capacity, need: Need, key: Key = KEY) -> list[NodeInfo]:
    """All nodes of an account as a job sees them."""
    return made.snapshot(key).nodes_for(need)
