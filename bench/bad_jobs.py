"""Jobs that the API server takes and that come to nothing: what a careless or hostile tenant sends a controller."""

from __future__ import annotations

from bench.cluster import Object, job


def refused(index: int, name: str) -> Object:
    """A job that the API server takes and that comes to nothing, of six kinds in turn; every fiftieth has 100 kB."""
    made = job(index, name)
    if index % 50 == 0:
        made["spec"]["config"]["deepspeed"] = {"texts": ["x" * 1_000] * 100}
    nested: Object = {}
    for _ in range(100):  # levels; 64 are taken
        nested = {"a": nested}
    template = (
        {"spec": {"hostNetwork": True}},
        {"spec": nested},
        {"spec": {f"field_{number}": number for number in range(200)}},
        {"spec": {"containers": "none", "tolerations": {}}},
        {"metadata": {"labels": {"a": ["not", "a", "word"]}}},
        {},  # nothing is wrong with it: a quota refuses its children
    )[index % 6]
    made["spec"]["learner"] = {**made["spec"].get("learner", {}), "template": template}
    return made


def quota(name: str) -> Object:
    """A ResourceQuota that forbids Deployments in a namespace."""
    hard = {"count/deployments.apps": "0"}
    metadata = {"name": "no-servers", "namespace": name}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}
