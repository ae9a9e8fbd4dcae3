"""Where the cluster keeps its files, and the addresses and names it uses: facts that every other module shares."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

NODE_NAME = "stage2-local"
"""Of the first node; the second is stage2-local-2."""
NODE_IP = "10.213.0.1"
"""Of the first node, which is the machine itself, and of the control plane. It is the address of a bridge: the kubelet
refuses loopback addresses, and nothing outside the machine reaches this."""
NODE_LINK = "stage2br0"
POD_CIDR = "10.211.0.0/16"
"""Of all pods; each node has 256 of these addresses."""
MAX_NODES = 254
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
    """Folders of one cluster, or of one of its further nodes: `home` goes at `down`, `cache` stays for the next `up`.

    number: the node whose state `home` holds; that of the first one lies in the cluster's own folder.
    """

    home: Path
    cache: Path
    number: int = 1

    @classmethod
    def default(cls, home: Path | None = None) -> "Layout":
        """`home`, else /var/lib/stage2-cluster; the cache follows the XDG base directory specification."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(home=home or Path("/var/lib/stage2-cluster"), cache=cache / "stage2" / "cluster")

    def node(self, number: int) -> "Layout":
        """One of the cluster's nodes."""
        return self if number == 1 else Layout(self.home / f"node-{number}", self.cache, number)

    def nodes(self) -> list["Layout"]:
        """The nodes that have folders, in the order of their numbers."""
        further = sorted(int(folder.name.removeprefix("node-")) for folder in self.home.glob("node-*"))
        return [self.node(number) for number in (1, *further)]

    @property
    def cluster(self) -> Path:
        """The folder of the whole cluster."""
        return self.home if self.number == 1 else self.home.parent

    @property
    def suffix(self) -> str:
        """What tells names of this node's things from those of the first one's."""
        return "" if self.number == 1 else f"-{self.number}"

    @property
    def node_name(self) -> str:
        """The name of the Node object."""
        return f"{NODE_NAME}{self.suffix}"

    @property
    def node_ip(self) -> str:
        """The node's own address."""
        return f"{NODE_IP.rpartition('.')[0]}.{self.number}"

    @property
    def pod_cidr(self) -> str:
        """The addresses of the node's pods."""
        return f"{POD_CIDR.rsplit('.', 2)[0]}.{self.number - 1}.0/24"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.cluster / "kubeconfig"

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
        return self.cluster / "pki"

    @property
    def containerd_socket(self) -> Path:
        """Where this node's own containerd answers."""
        return self.home / "containerd.sock"

    @property
    def containerd_root(self) -> Path:
        """Images and snapshots: in the cache, so that a later cluster finds them; those of further nodes are links."""
        return self.cache / f"containerd{self.suffix}"

    @property
    def cgroup(self) -> str:
        """Parent of every pod's cgroup, relative to each hierarchy's root."""
        return f"/stage2-cluster{self.suffix}"


def need_space(folder: Path, wanted_bytes: int, what: str) -> None:
    """Raise where the disk of a folder has too little left: what fills it harms everything on the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < wanted_bytes:
        raise ClusterError(
            f"{folder}: {free / 1e9:.1f} GB free; {what} needs {wanted_bytes / 1e9:.1f} GB; free some "
            "(`hack/local-cluster/local-cluster cache --prune`), or set XDG_CACHE_HOME to a folder of a larger disk"
        )
