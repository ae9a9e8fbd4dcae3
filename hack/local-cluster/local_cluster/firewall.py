"""kube-router as the cluster's enforcer of NetworkPolicies, which its CNI plugin itself knows nothing of."""

from dataclasses import dataclass

from rich.console import Console

from local_cluster import network
from local_cluster.layout import SERVICE_CIDR, Layout
from local_cluster.pki import kubeconfig_of
from local_cluster.processes import forget, named, spawn, stop, wait_until
from local_cluster.toolchain import Binary, ensure_binaries, ensure_packages, path_of

BINARY = Binary("kube-router", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router")
CHAIN = "KUBE-ROUTER-FORWARD"


@dataclass(frozen=True)
class Firewall:
    """Turns NetworkPolicies on and off; without it every pod reaches every other."""

    name = BINARY.name

    def enable(self, layout: Layout, console: Console) -> None:
        """Start it, and wait until packets pass its chain."""
        ensure_packages(console)
        ensure_binaries(layout, [BINARY], console)
        for node in layout.nodes():
            if not any(daemon.alive() for daemon in named(node, self.name)):
                self._start(node)

    def _start(self, layout: Layout) -> None:
        flags = [
            *("--run-firewall=true", "--run-router=false", "--run-service-proxy=false", "--enable-cni=false"),
            *("--metrics-port=0", "--health-port=0", "--v=1"),
            f"--hostname-override={layout.node_name}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--kubeconfig={kubeconfig_of(layout, 'admin')}",
        ]
        daemon = spawn(layout, self.name, [path_of(layout, BINARY), *flags])
        wait_until(layout, lambda: network.has_chain(layout, CHAIN), what="the firewall", daemon=daemon)

    def disable(self, layout: Layout, console: Console) -> None:
        """Stop it, and remove its chains and sets."""
        for node in layout.nodes():
            for daemon in named(node, self.name):
                stop([daemon])
                forget(node, daemon)
            network.remove_firewall(node)
