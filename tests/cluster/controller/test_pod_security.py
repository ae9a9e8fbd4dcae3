"""Pods of every example, sent to an API server that enforces Pod Security restricted in the test's namespace."""

import copy
from collections.abc import Iterator
from pathlib import Path

import yaml

from stage2_api.parsing import parse_job
from stage2_controller.children.build import static_children
from tests.cluster.controller.conftest import Kubectl, Object
from tests.support.clusters import ROOT

JOBS = sorted((ROOT / "examples").glob("job-*.yaml"))


def pods_of(path: Path) -> Iterator[Object]:
    """The pods of all jobs in a file, as their Deployments, Jobs and JobSets would make them."""
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        if document["kind"] == "RolloutMatchingJob":
            for child in static_children(parse_job(document)):
                for number, template in enumerate(templates_of(child)):
                    metadata = {**template["metadata"], "name": f"{child['metadata']['name']}-{number}"}
                    yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def templates_of(child: Object) -> list[Object]:
    """The pod templates of a child; none of one that makes no pods."""
    if child["kind"] == "JobSet":
        return [one["template"]["spec"]["template"] for one in child["spec"]["replicatedJobs"]]
    return [child["spec"]["template"]] if child["kind"] in ("Deployment", "Job") else []


def refusal(kubectl: Kubectl, *pods: Object) -> str:
    """Why the API server takes not all of these pods; nothing where it does."""
    listed = {"apiVersion": "v1", "kind": "List", "items": list(pods)}
    return kubectl.run("create", "--dry-run=server", "-f", "-", stdin=listed).stderr


def test_example_pods_pass_restricted_pod_security_and_weakened_pod_does_not(kubectl: Kubectl) -> None:
    for path in JOBS:
        pods = list(pods_of(path))
        assert pods
        assert refusal(kubectl, *pods) == "", path.name
        loose = copy.deepcopy(pods[0])
        loose["spec"]["containers"][0]["securityContext"].pop("capabilities")
        assert 'violates PodSecurity "restricted:latest": unrestricted capabilities' in refusal(kubectl, loose)
