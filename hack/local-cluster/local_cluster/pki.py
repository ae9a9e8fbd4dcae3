"""The cluster's own certificate authority, the components' certificates, and their kubeconfigs."""

import base64
import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from local_cluster.layout import API_SERVICE_IP, CLUSTER_DOMAIN, NODE_IP, NODE_NAME, Layout

LIFETIME = datetime.timedelta(days=365)
FRONT_PROXY = "front-proxy-client"
"""Who the API server is to the API servers of others, to which it passes requests on with their users' names."""


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and of its private key, PEM."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """A self-signed certificate authority that lives in one folder."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    cert: x509.Certificate

    @classmethod
    def create(cls, folder: Path) -> "Authority":
        """Make the authority and write ca.crt."""
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("stage2-local-cluster", ())
        usage = _key_usage(authority=True)
        builder = _builder(name, name, key.public_key()).add_extension(usage, critical=True)
        cert = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(
            key, hashes.SHA256()
        )
        (folder / "ca.crt").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        return cls(folder, key, cert)

    @property
    def cert_file(self) -> Path:
        """The authority's certificate, PEM."""
        return self.folder / "ca.crt"

    def issue(self, file: str, name: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> Pair:
        """Certificate for user `name` in `groups` (Kubernetes reads CN and O), or for a server answering as `hosts`."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name, groups), self.cert.subject, key.public_key())
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(_key_usage(authority=False), critical=True).add_extension(
            usages, critical=False
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        cert = builder.sign(self.key, hashes.SHA256())
        return Pair(
            _write(self.folder / f"{file}.crt", cert.public_bytes(serialization.Encoding.PEM)),
            _write(self.folder / f"{file}.key", _private_pem(key)),
        )


def _write(path: Path, content: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(common_name: str, organizations: Sequence[str]) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, name) for name in organizations]
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(now + LIFETIME)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_encipherment=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


@dataclass(frozen=True)
class Credentials:
    """Everything the components present to each other."""

    ca: Path
    api_server: Pair
    api_server_client: Pair
    front_proxy_ca: Path
    front_proxy: Pair
    kubelet: Pair
    service_account_key: Path
    service_account_public_key: Path


def create(layout: Layout, api_host: str, api_port: int) -> Credentials:
    """Make the authority, the servers' certificates and one kubeconfig for each user of the API."""
    ca = Authority.create(layout.pki)
    front_proxy = Authority.create(layout.pki / "front-proxy")
    service = [f"kubernetes.default.svc.{CLUSTER_DOMAIN}", "kubernetes.default.svc", "kubernetes.default", "kubernetes"]
    api_hosts = [*service, "localhost", "127.0.0.1", NODE_IP, API_SERVICE_IP]
    credentials = Credentials(
        ca=ca.cert_file,
        api_server=ca.issue("api-server", "kube-apiserver", hosts=api_hosts),
        api_server_client=ca.issue("api-server-client", "kube-apiserver", ["system:masters"]),
        front_proxy_ca=front_proxy.cert_file,
        front_proxy=front_proxy.issue("client", FRONT_PROXY),
        kubelet=ca.issue("kubelet-server", NODE_NAME, hosts=[NODE_IP, NODE_NAME]),
        service_account_key=layout.pki / "service-account.key",
        service_account_public_key=layout.pki / "service-account.pub",
    )
    _service_account_keys(credentials)
    users = {
        "admin": ("stage2-admin", ["system:masters"]),
        "controller-manager": ("system:kube-controller-manager", []),
        "scheduler": ("system:kube-scheduler", []),
        "kubelet": (f"system:node:{NODE_NAME}", ["system:nodes"]),
        "kube-proxy": ("system:kube-proxy", []),
        "coredns": ("system:coredns", []),
    }
    for file, (name, groups) in users.items():
        pair = ca.issue(file, name, groups)
        _write_kubeconfig(kubeconfig_of(layout, file), f"https://{api_host}:{api_port}", ca.cert_file, pair)
    return credentials


def kubeconfig_of(layout: Layout, user: str) -> Path:
    """The kubeconfig of one component."""
    return layout.kubeconfig if user == "admin" else layout.pki / f"{user}.kubeconfig"


def _service_account_keys(credentials: Credentials) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    _write(credentials.service_account_key, _private_pem(key))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    _write(credentials.service_account_public_key, public)


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
