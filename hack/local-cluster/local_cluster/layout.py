"""Where the cluster keeps its files, and the addresses and names it uses: facts that every other module shares."""

import os
from dataclasses import dataclass
from pathlib import Path

NODE_NAME = "stage2-local"
NODE_IP = "10.213.0.1"
"""On a bridge without ports: the kubelet refuses loopback addresses, and nothing outside the machine reaches this."""
NODE_LINK = "stage2br0"
POD_CIDR = "10.211.0.0/24"
SERVICE_CIDR = "10.212.0.0/20"
API_SERVICE_IP = "10.212.0.1"
DNS_SERVICE_IP = "10.212.0.10"
CLUSTER_DOMAIN = "cluster.local"

HUB = "docker.io/"
"""What a reference without a host means; containerd keeps images under their full names."""
PAUSE_IMAGE = f"{HUB}stage2/pause:local"

MARKER = "STAGE2_LOCAL_CLUSTER"
"""Environment variable that every process of a cluster carries, with the cluster's folder as its value."""

KUBELET_STATE = Path("/var/lib/kubelet")
"""Compiled into the kubelet as the home of device plugin sockets, whatever its --root-dir is."""
CONTAINER_LOG_LINKS = Path("/var/log/containers")
"""Compiled into the kubelet as the home of links to container logs."""


class ClusterError(Exception):
    """Something a person must know; the text says what happened and what to do."""


@dataclass(frozen=True)
class Layout:
    """Folders of one cluster: `home` goes at `down`, `cache` stays for the next `up`."""

    home: Path
    cache: Path

    @classmethod
    def default(cls, home: Path | None = None) -> "Layout":
        """`home`, else /var/lib/stage2-cluster; the cache follows the XDG base directory specification."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(home=home or Path("/var/lib/stage2-cluster"), cache=cache / "stage2" / "cluster")

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.home / "kubeconfig"

    @property
    def logs(self) -> Path:
        """One file per component."""
        return self.home / "logs"

    @property
    def records(self) -> Path:
        """One JSON file per process that was started."""
        return self.home / "processes"

    @property
    def pki(self) -> Path:
        """Keys, certificates and the components' kubeconfigs."""
        return self.home / "pki"

    @property
    def containerd_socket(self) -> Path:
        """Where this cluster's own containerd answers."""
        return self.home / "containerd.sock"

    @property
    def containerd_root(self) -> Path:
        """Images and snapshots: in the cache, so that a later cluster finds them."""
        return self.cache / "containerd"

    @property
    def cgroup(self) -> str:
        """Parent of every pod's cgroup, relative to each hierarchy's root."""
        return "/stage2-cluster"
