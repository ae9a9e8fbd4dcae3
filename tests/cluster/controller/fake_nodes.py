"""Nodes without a kubelet: real Node objects, on which the real scheduler binds pods that never run.

A thread does what the API server and its controllers expect of a kubelet: it renews leases and confirms deletions.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.cluster import objects

if TYPE_CHECKING:
    from tests.cluster.controller.conftest import Kubectl

logger = logging.getLogger(__name__)

_BEAT_S = 0.5
_RENEW_S = 8.0


class FakeNodes:
    """Adds nodes and takes them away again; `close` ends the thread and removes them all."""

    def __init__(self, kubectl: "Kubectl") -> None:
        self._kubectl = kubectl
        self._leases = replace(kubectl, namespace="kube-node-lease")
        self._names: list[str] = []
        self._silent: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def add(
        self,
        name: str,
        *,
        gpus: int = 4,
        resource: str = "nvidia.com/gpu",
        labels: Mapping[str, str] | None = None,
        taints: Any = (),
    ) -> str:
        """A ready node."""
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
            "spec": {"taints": list(taints)},
        }
        self._kubectl("create", "-f", "-", stdin=node)
        self._names.append(name)
        self._renew()
        amounts = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "512Gi", "pods": "500"}
        amounts[resource] = str(gpus)
        self._kubectl.set_status("node", name, {"capacity": amounts, "allocatable": amounts, "conditions": [ready()]})
        self._kubectl("taint", "node", name, "node.kubernetes.io/not-ready-", "--overwrite", check=False)
        return name

    def silence(self, name: str) -> None:
        """The node stops to answer: its kubelet is gone, and nothing confirms deletions there."""
        self._silent.add(name)
        self._kubectl.set_status("node", name, {"conditions": [ready("False")]})

    def remove(self, name: str) -> None:
        """Deletes the Node, as a cloud does with a machine that is gone."""
        self._names.remove(name)
        self._kubectl("delete", "node", name, "--wait=false")
        self._leases("delete", "lease", name, "--ignore-not-found")

    def close(self) -> None:
        """Ends the thread and removes all nodes."""
        for name in [*self._names]:
            self.remove(name)
        self._reap(everywhere=True)
        self._stopped.set()
        self._thread.join()

    def _live(self) -> None:
        renewed = 0.0
        while not self._stopped.wait(_BEAT_S):
            if time.monotonic() - renewed >= _RENEW_S:
                renewed = time.monotonic()
                self._renew()
            self._reap()

    def _renew(self) -> None:
        """Every node that is not silent says that it lives: without its Lease it counts as lost after 50 s."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        leases = [
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name},
                "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now},
            }
            for name in self._names
            if name not in self._silent
        ]
        if leases:
            body = {"apiVersion": "v1", "kind": "List", "items": leases}
            done = self._leases.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=body)
            if done.returncode:  # an API server that was killed is asked again
                logger.warning("the leases of %s are not renewed: %s", self._names, done.stderr)

    def _reap(self, *, everywhere: bool = False) -> None:
        """Pods that were asked to end on these nodes are gone at once."""
        try:
            pods = self._kubectl.list("pods")
        except objects.FAILURES:  # an API server that was killed is asked again
            return
        for pod in pods:
            node = pod["spec"].get("nodeName")
            ours = everywhere or (node in self._names and node not in self._silent)
            if node and ours and "deletionTimestamp" in pod["metadata"]:
                ended = json.dumps({"status": {"phase": "Failed", "reason": "Terminated"}})
                name = pod["metadata"]["name"]
                self._kubectl.run("patch", "pod", name, "--subresource=status", "--type=merge", "-p", ended)
                self._kubectl.run("delete", "pod", name, "--force", "--grace-period=0")


def ready(status: str = "True") -> dict[str, str]:
    """The Ready condition of a node."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "Ready",
        "status": status,
        "reason": "Fake",
        "message": "no kubelet",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
