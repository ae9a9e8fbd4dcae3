"""The cluster's certificate authorities, the certificates of its components, and their kubeconfigs.

trustme makes the certificates: each is good for servers and for clients, with an EC key. Kubernetes reads a user's name
from the common name, and a group from the organisation.
"""

import base64
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from local_cluster.layout import API_SERVICE_IP, CLUSTER_DOMAIN, NODE_IP, Layout

LIFETIME = datetime.timedelta(days=365)
FRONT_PROXY = "front-proxy-client"
"""Who the API server is to the API servers of others, to which it passes requests with their users' names."""
NO_HOST = "client.invalid"
"""The host in a certificate that only a client presents: Go refuses one with an empty list of hosts."""
NO_GROUP = "stage2-local-cluster"
"""The organisation in the certificate of a user that is in no group: no role is bound to it."""
USERS = {
    "admin": ("stage2-admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", NO_GROUP),
    "scheduler": ("system:kube-scheduler", NO_GROUP),
    "kube-proxy": ("system:kube-proxy", NO_GROUP),
    "coredns": ("system:coredns", NO_GROUP),
}
"""Who has a kubeconfig beside the nodes: its file, the user's name and group."""


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and of its private key, PEM."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Credentials:
    """Everything that the components present to each other."""

    ca: Path
    api_server: Pair
    api_server_client: Pair
    front_proxy_ca: Path
    front_proxy: Pair
    kubelets: Mapping[str, Pair]
    service_account_key: Path
    service_account_public_key: Path


class Authority:
    """A certificate authority, whose certificate is ca.crt of a folder that only its owner can read."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._folder = folder
        self._ca = trustme.CA()
        self.cert_file = _write(folder / "ca.crt", self._ca.cert_pem.bytes())

    def issue(self, file: str, name: str, group: str = NO_GROUP, hosts: Sequence[str] = (NO_HOST,)) -> Pair:
        """Write FILE.crt and FILE.key for user `name` of `group`, or for a server that answers as `hosts`."""
        not_after = datetime.datetime.now(datetime.UTC) + LIFETIME
        leaf = self._ca.issue_cert(*hosts, common_name=name, organization_name=group, not_after=not_after)
        return Pair(
            _write(self._folder / f"{file}.crt", leaf.cert_chain_pems[0].bytes()),
            _write(self._folder / f"{file}.key", leaf.private_key_pem.bytes()),
        )


def create(nodes: Sequence[Layout], api_host: str, api_port: int) -> Credentials:
    """Create the authorities, the servers' certificates and one kubeconfig for each user of the API, nodes included."""
    layout = nodes[0]
    ca, front_proxy = Authority(layout.pki), Authority(layout.pki / "front-proxy")
    service = [f"kubernetes.default.svc.{CLUSTER_DOMAIN}", "kubernetes.default.svc", "kubernetes.default", "kubernetes"]
    api_hosts = [*service, "localhost", "127.0.0.1", NODE_IP, API_SERVICE_IP]
    key, public_key = _service_account_keys(layout)
    users = {**USERS, **{node.node_name: (f"system:node:{node.node_name}", "system:nodes") for node in nodes}}
    for file, (name, group) in users.items():
        pair = ca.issue(file, name, group)
        _write_kubeconfig(kubeconfig_of(layout, file), f"https://{api_host}:{api_port}", ca.cert_file, pair)
    return Credentials(
        ca=ca.cert_file,
        api_server=ca.issue("api-server", "kube-apiserver", hosts=api_hosts),
        api_server_client=ca.issue("api-server-client", "kube-apiserver", "system:masters"),
        front_proxy_ca=front_proxy.cert_file,
        front_proxy=front_proxy.issue("client", FRONT_PROXY),
        kubelets={
            node.node_name: ca.issue(f"{node.node_name}-server", node.node_name, hosts=[node.node_ip, node.node_name])
            for node in nodes
        },
        service_account_key=key,
        service_account_public_key=public_key,
    )


def kubeconfig_of(layout: Layout, user: str) -> Path:
    """Return the path of a user's kubeconfig."""
    return layout.kubeconfig if user == "admin" else layout.pki / f"{user}.kubeconfig"


def _service_account_keys(layout: Layout) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _write(layout.pki / "service-account.key", private), _write(layout.pki / "service-account.pub", public)


def _write(path: Path, content: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path


def _write_kubeconfig(path: Path, server: str, ca: Path, pair: Pair) -> None:
    def inline(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    name = "stage2-local"
    user = {"client-certificate-data": inline(pair.cert), "client-key-data": inline(pair.key)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority-data": inline(ca)}}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    _write(path, yaml.safe_dump(document).encode())
