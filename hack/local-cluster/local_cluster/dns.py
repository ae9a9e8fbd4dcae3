"""CoreDNS as a process of the node, behind the Service that pods use as their resolver."""

import contextlib
import socket

import yaml

from local_cluster.control_plane import free_port, kubectl
from local_cluster.layout import CLUSTER_DOMAIN, DNS_SERVICE_IP, NODE_IP, ClusterError, Layout
from local_cluster.pki import kubeconfig_of
from local_cluster.processes import spawn
from local_cluster.toolchain import binary_path

PORTS = (53, 5353)
"""Where name servers listen, and where the policies of pods let them ask; the second one for a machine that has a name
server of its own on every address."""
COREFILE = """\
.:{port} {{
    bind {address}
    errors
    ready 127.0.0.1:{ready_port}
    kubernetes {domain} in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
        ttl 5
    }}
    forward . /etc/resolv.conf
    cache 5
}}
"""


def start(layout: Layout) -> None:
    """Start CoreDNS and make it known inside the cluster as Service kube-system/kube-dns."""
    port = _port()
    corefile = layout.home / "Corefile"
    corefile.write_text(
        COREFILE.format(
            port=port,
            address=NODE_IP,
            ready_port=free_port(),
            domain=CLUSTER_DOMAIN,
            kubeconfig=kubeconfig_of(layout, "coredns"),
        )
    )
    kubectl(layout, "apply", "--filename=-", stdin=yaml.safe_dump_all(_manifests(port)))
    spawn(layout, "coredns", [binary_path(layout, "coredns"), f"-conf={corefile}"])


def _port() -> int:
    for port in PORTS:
        with contextlib.suppress(OSError), socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((NODE_IP, port))
            udp.bind((NODE_IP, port))
            return port
    raise ClusterError(f"CoreDNS needs one of the ports {PORTS} of {NODE_IP}, and all are taken; free one of them")


def _manifests(port: int) -> list[dict[str, object]]:
    protocols = [("dns", "UDP"), ("dns-tcp", "TCP")]
    watched = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {
                "clusterIP": DNS_SERVICE_IP,
                "ports": [{"name": name, "port": 53, "targetPort": port, "protocol": kind} for name, kind in protocols],
            },
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns",
                "namespace": "kube-system",
                "labels": {"kubernetes.io/service-name": "kube-dns"},
            },
            "addressType": "IPv4",
            "ports": [{"name": name, "port": port, "protocol": kind} for name, kind in protocols],
            "endpoints": [{"addresses": [NODE_IP], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "stage2-coredns"},
            "rules": watched,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "stage2-coredns"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "stage2-coredns"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:coredns"}],
        },
    ]
