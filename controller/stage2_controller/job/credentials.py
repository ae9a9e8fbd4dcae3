"""A job's credentials: the bearer token, and a TLS certificate for each role that serves HTTP.

Each job has an authority of its own, which signs its certificates. The authority's key is discarded at once, so that it
never signs anything else, and the members of a job trust no other job's certificates.
"""

import base64
import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stage2_api.pod import layout

LIFETIME = timedelta(days=365)
RENEWED_BEFORE_END = timedelta(days=30)
# Each member answers HTTP, and over the links of weight sync servers show their certificates to the learner.
_USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_CLOCKS_DIFFER = timedelta(hours=1)  # between the controller's machine and the nodes

Hosts = Mapping[str, Sequence[str]]
"""The names of each role; empty for a job without TLS."""


def new(hosts: Hosts, now: datetime) -> dict[str, str]:
    """Return the content of a new Secret by key."""
    return {layout.TOKEN_KEY: secrets.token_urlsafe(32), **(_certificates(hosts, now) if hosts else {})}


def is_usable(secret: Mapping[str, Any], *, tls: bool, now: datetime) -> bool:
    """Return whether new pods can use this Secret for their whole life."""
    authority = (secret.get("data") or {}).get(layout.CA_KEY)
    if authority is None or not tls:
        return (authority is not None) == tls
    try:
        until = x509.load_pem_x509_certificate(base64.b64decode(authority)).not_valid_after_utc
    except ValueError:  # somebody else wrote it
        return False
    return now < until - RENEWED_BEFORE_END


def serve_links(secret: Mapping[str, Any]) -> bool:
    """Return whether servers can show these certificates to their learner; those of earlier controllers cannot."""
    texts = [base64.b64decode(pem) for key, pem in (secret.get("data") or {}).items() if key.endswith(".crt")]
    extensions = [one.value for text in texts for one in x509.load_pem_x509_certificate(text).extensions]
    return all(set(_USAGES) <= set(one) for one in extensions if isinstance(one, x509.ExtendedKeyUsage))


def has_certificates(secret: Mapping[str, Any]) -> bool:
    """Return whether pods with this Secret serve TLS."""
    return layout.CA_KEY in (secret.get("data") or {})


def _certificates(hosts: Hosts, now: datetime) -> dict[str, str]:
    authority = _Authority(now)
    content = {layout.CA_KEY: _pem(authority.certificate)}
    for role, names in hosts.items():
        key = ec.generate_private_key(ec.SECP256R1())
        content[layout.certificate_key(role)] = _pem(authority.sign(names, key.public_key()))
        content[layout.private_key_key(role)] = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
    return content


class _Authority:
    def __init__(self, now: datetime) -> None:
        self._now = now.astimezone(UTC)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stage2 job")])
        self._identity = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        constraint = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = (
            self._unsigned(self._name, self._key.public_key())
            .add_extension(constraint, critical=True)
            .add_extension(_key_usage(authority=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def sign(self, names: Sequence[str], key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """Return a certificate for a server with these names."""
        return (
            self._unsigned(x509.Name([]), key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_USAGES), critical=False)
            # critical: RFC 5280 requires it for a certificate without a subject
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier(self._identity.digest, None, None), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _unsigned(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _CLOCKS_DIFFER)
            .not_valid_after(self._now + LIFETIME)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
