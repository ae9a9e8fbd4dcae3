"""Kueue and JobSet on the cluster, built from their modules, and a controller that knows Kueue."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, chart_rights
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.kueue.queues import queue
from tests.support.clusters import LocalCluster

WORKLOADS = "workloads.kueue.x-k8s.io"
JOBSETS = "jobsets.jobset.x-k8s.io"


@pytest.fixture(scope="session")
def kueue(admin: Kubectl, request: pytest.FixtureRequest, local_cluster: LocalCluster) -> Iterator[None]:
    """Kueue on the cluster; one that it did not have before goes at the end."""
    yield from _enabled("kueue", WORKLOADS, admin, request, local_cluster)


@pytest.fixture(scope="session")
def jobset(admin: Kubectl, request: pytest.FixtureRequest, local_cluster: LocalCluster) -> Iterator[None]:
    """JobSet on the cluster; one that it did not have before goes at the end."""
    yield from _enabled("jobset", JOBSETS, admin, request, local_cluster)


def _enabled(
    addon: str, crd: str, admin: Kubectl, request: pytest.FixtureRequest, local_cluster: LocalCluster
) -> Iterator[None]:
    if admin.get("crd", crd) is not None:
        yield
        return
    request.getfixturevalue("on_local_cluster")
    try:
        local_cluster("enable", addon)
        yield
    finally:
        local_cluster("disable", addon)


@pytest.fixture
def team(kueue: None, kubectl: Kubectl, nodes: FakeNodes) -> Iterator[list[str]]:
    """Two nodes of four GPUs, and a queue `team` with a quota of four; the nodes' names."""
    own = kubectl.namespace
    names = [nodes.add(f"{own}-{index}", gpus=4, labels=HERE) for index in range(2)]
    with queue(kubectl, own):
        yield names


@pytest.fixture
def controller(team: list[str], kubectl: Kubectl, helm: str, tmp_path: Path) -> Iterator[Controller]:
    """A controller that knows Kueue, with the rights that the chart gives it then."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(chart_rights(kubectl, helm, "controller.kueue=true")))
    running = Controller(kubeconfig, kubectl.namespace, tmp_path / "controller.log", "--kueue")
    running.start()
    yield running
    running.stop()
    assert "Traceback" not in running.text(), running.text()


@pytest.fixture
def plain(kubectl: Kubectl, helm: str, tmp_path: Path) -> Iterator[Controller]:
    """A controller that neither chooses nodes nor knows Kueue: JobSet and Kueue need none of it."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(chart_rights(kubectl, helm, "controller.placement=false")))
    with Controller(kubeconfig, kubectl.namespace, tmp_path / "log", "--no-placement", "--progress-seconds=2") as one:
        yield one
    assert "Traceback" not in one.text(), one.text()
