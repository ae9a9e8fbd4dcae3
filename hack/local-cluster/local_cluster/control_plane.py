"""etcd and the API server, which may live alone, and the controller manager and scheduler of a whole cluster."""

import socket
from dataclasses import dataclass

from local_cluster import packaged
from local_cluster.layout import NODE_IP, SERVICE_CIDR, ClusterError, Layout
from local_cluster.pki import FRONT_PROXY, Credentials, kubeconfig_of
from local_cluster.processes import Daemon, run, spawn, wait_until
from local_cluster.toolchain import binary_path

ISSUER = "https://kubernetes.default.svc.cluster.local"


@dataclass(frozen=True)
class Endpoint:
    """Where the API server answers; alone, it keeps to the loopback address."""

    host: str
    port: int

    @property
    def alone(self) -> bool:
        """Whether no node will ever join."""
        return self.host != NODE_IP


def free_port(host: str = "127.0.0.1") -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def start_etcd(layout: Layout) -> str:
    """Start etcd with fsync off, its data in the cluster's folder; return its client URL."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    daemon = spawn(
        layout,
        "etcd",
        [
            binary_path(layout, "etcd"),
            f"--data-dir={layout.home / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
    )
    port = int(client.rpartition(":")[2])
    wait_until(layout, lambda: _listens(port), what="etcd", daemon=daemon, every_s=0.05)
    return client


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_api_server(layout: Layout, credentials: Credentials, endpoint: Endpoint, etcd_url: str) -> Daemon:
    """Start the API server and wait until it says that it is ready."""
    daemon = spawn(
        layout,
        "kube-apiserver",
        [
            binary_path(layout, "kube-apiserver"),
            f"--etcd-servers={etcd_url}",
            f"--bind-address={endpoint.host}",
            f"--secure-port={endpoint.port}",
            *(["--endpoint-reconciler-type=none"] if endpoint.alone else [f"--advertise-address={NODE_IP}"]),
            f"--client-ca-file={credentials.ca}",
            f"--tls-cert-file={credentials.api_server.cert}",
            f"--tls-private-key-file={credentials.api_server.key}",
            f"--kubelet-certificate-authority={credentials.ca}",
            f"--kubelet-client-certificate={credentials.api_server_client.cert}",
            f"--kubelet-client-key={credentials.api_server_client.key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={credentials.front_proxy_ca}",
            f"--requestheader-allowed-names={FRONT_PROXY}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={credentials.front_proxy.cert}",
            f"--proxy-client-key-file={credentials.front_proxy.key}",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={credentials.service_account_public_key}",
            f"--service-account-signing-key-file={credentials.service_account_key}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--cert-dir={layout.pki}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
        ],
    )
    wait_until(layout, lambda: _ready(layout), what="the API server", daemon=daemon)
    return daemon


def _ready(layout: Layout) -> bool:
    try:
        return kubectl(layout, "get", "--raw", "/readyz") == "ok"
    except ClusterError:
        return False


def start_controllers(layout: Layout, credentials: Credentials) -> None:
    """Start the controller manager and the scheduler, alone in their roles, so without leader election."""
    common = ["--leader-elect=false", "--bind-address=127.0.0.1"]
    manager = kubeconfig_of(layout, "controller-manager")
    spawn(
        layout,
        "kube-controller-manager",
        [
            binary_path(layout, "kube-controller-manager"),
            f"--kubeconfig={manager}",
            f"--secure-port={free_port()}",
            f"--root-ca-file={credentials.ca}",
            f"--service-account-private-key-file={credentials.service_account_key}",
            "--use-service-account-credentials",
            f"--cert-dir={layout.pki}",
            *common,
        ],
    )
    scheduler = kubeconfig_of(layout, "scheduler")
    spawn(
        layout,
        "kube-scheduler",
        [
            binary_path(layout, "kube-scheduler"),
            f"--kubeconfig={scheduler}",
            f"--secure-port={free_port()}",
            f"--cert-dir={layout.pki}",
            *common,
        ],
    )


def kubectl(layout: Layout, *arguments: str, stdin: str | None = None) -> str:
    """Run kubectl as the cluster's administrator and return what it prints."""
    return run([str(packaged.program(layout, "kubectl")), f"--kubeconfig={layout.kubeconfig}", *arguments], stdin=stdin)
