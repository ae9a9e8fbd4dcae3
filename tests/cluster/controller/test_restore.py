"""An API server that is restored from a backup: the controller says so, and lists everything anew."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.controller.conftest import CRD, Controller, Kubectl, Object, eventually, job
from tests.support.clusters import LocalCluster

pytestmark = pytest.mark.in_turns(3)
NAMESPACE = "restored"
VERSIONS = 200


class ControlPlane:
    """etcd and an API server of their own, whose data can be copied and put back."""

    def __init__(self, local_cluster: LocalCluster, home: Path) -> None:
        self._local_cluster = local_cluster
        self._home = home
        self.kubeconfig = local_cluster.up("--control-plane-only", "--dir", str(home))

    def without(self, name: str) -> None:
        """Kills a component."""
        os.kill(json.loads((self._home / "processes" / f"{name}.json").read_text())["pid"], signal.SIGKILL)

    def replace_data(self, source: str, target: str) -> None:
        """Copies etcd's data while it is off."""
        for name in ("kube-apiserver", "etcd"):
            self.without(name)
        shutil.rmtree(self._home / target, ignore_errors=True)
        shutil.copytree(self._home / source, self._home / target)
        self._local_cluster("mend", "--dir", str(self._home))

    def down(self) -> None:
        self._local_cluster("down", "--dir", str(self._home))


@pytest.fixture
def control_plane(local_cluster: LocalCluster, tmp_path: Path) -> Iterator[ControlPlane]:
    made = ControlPlane(local_cluster, tmp_path / "home")
    yield made
    made.down()


@pytest.fixture
def kubectl(control_plane: ControlPlane) -> Kubectl:
    """kubectl in a namespace of a server that knows jobs; nothing else acts on its objects."""
    made = Kubectl(control_plane.kubeconfig, NAMESPACE)
    made("create", "namespace", NAMESPACE)
    made("apply", "--server-side", "-f", str(CRD))
    eventually(lambda: made.run("get", "rmj").returncode == 0, why="the API server serves the definition")
    return made


def maps(count: int) -> Object:
    """So many ConfigMaps: what comes later has a version that a restored server does not reach by its own writes."""
    items = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{number}"}} for number in range(count)]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def answers(kubectl: Kubectl) -> bool:
    return kubectl.run("get", "--raw", "/readyz").returncode == 0


def test_controller_restarts_and_relists_after_api_server_is_restored(
    control_plane: ControlPlane, kubectl: Kubectl, tmp_path: Path
) -> None:
    """It went on with what no etcd had any more, and its /healthz was well."""
    running = Controller(kubectl.kubeconfig, NAMESPACE, tmp_path / "controller.log", "--no-placement")
    running.start()
    try:
        kubectl.apply(job("before"))
        eventually(lambda: kubectl.get("deployment", "before-rollout"), why="it has children")
        control_plane.replace_data("etcd", "backup")
        eventually(lambda: answers(kubectl), why="it answers")
        assert not running.ended(), "an API server that was away is no backup"
        kubectl.apply(maps(VERSIONS))
        kubectl.apply(job("after"))
        eventually(lambda: kubectl.get("deployment", "after-rollout"), why="it has children")
        kubectl("delete", "rmj", "before")
        control_plane.replace_data("backup", "etcd")
        eventually(lambda: answers(kubectl), why="it answers")
        eventually(running.ended, why="the world that it knew is gone")
        assert "the API server was restored from a backup" in running.text()
        assert "this is a bug" not in running.text()
        running.start()
        kubectl("patch", "rmj", "before", "--type=merge", "-p", '{"spec": {"suspend": true}}')
        eventually(lambda: kubectl.get("deployment", "before-rollout") is None, why="it acts on what there is")
        assert kubectl.get("rmj", "after") is None
        assert kubectl.get("deployment", "after-rollout") is None
    finally:
        running.stop()
