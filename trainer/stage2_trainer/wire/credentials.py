"""A server's address, and how the members of a job prove who they are: the bearer token, and certificates for TLS.

The files are named by environment variables: a job's pods get them from the controller, `stage2 run` sets them for its
processes, and a person names their own. A server's base_url decides whether it is reached over TLS.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from stage2_api.errors import ConfigError, Problem, refused
from stage2_api.pod.layout import (
    TLS_CA_FILE_VARIABLE,
    TLS_CERT_FILE_VARIABLE,
    TLS_KEY_FILE_VARIABLE,
    TOKEN_FILE_VARIABLE,
)

SCHEME = "https://"
DEFAULT_PORTS = {"http": 80, "https": 443}
PROBE_S = 2.0
# OpenSSL's codes of what X509_verify_cert found (x509_vfy.h).
_NOT_YET_VALID, _EXPIRED, _OTHER_HOST, _OTHER_ADDRESS = 9, 10, 62, 64
# OpenSSL's reasons for an answer that is not TLS.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"})

_TOKEN_WAY_OUT = (
    "write a token to a file that only you can read (`openssl rand -hex 32 > token; chmod 600 token`) "
    f"and set {TOKEN_FILE_VARIABLE} to its path for the servers and the learner"
)
_CA_WAY_OUT = f"set {TLS_CA_FILE_VARIABLE} to the certificate of the authority that signed the servers' certificates"
_CERT_WAY_OUT = (
    f"set {TLS_CERT_FILE_VARIABLE} and {TLS_KEY_FILE_VARIABLE} to a certificate for this process's host and its key"
)


def read_token(environment: Mapping[str, str]) -> str:
    """Return the token in the file that STAGE2_TOKEN_FILE names; it is in no argument and no variable itself.

    Raises:
        ConfigError: the variable is not set, the file cannot be read, or it is empty.
    """
    path = environment.get(TOKEN_FILE_VARIABLE, "")
    rule = ""
    if not path:
        rule = "must name a file that holds the bearer token"
    else:
        try:
            if token := Path(path).read_text(encoding="utf-8").strip():
                return token
            rule = "must not be empty"
        except OSError as error:
            rule = f"must be a readable file ({error.strerror})"
    raise refused(TOKEN_FILE_VARIABLE, path, rule, _TOKEN_WAY_OUT)


@dataclass(frozen=True)
class Certificate:
    """The files of a process's certificate: a chain, its own certificate first, and the private key."""

    chain: str
    key: str

    def context(self) -> ssl.SSLContext:
        """Return the settings of an HTTP server."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.chain, self.key, password=_no_password)
        return context

    def learner_context(self, environment: Mapping[str, str]) -> ssl.SSLContext:
        """Return the settings of the learner's end of links: workers must show a certificate of the authority.

        Raises:
            ConfigError: the authority's file cannot be read.
        """
        context = _for_links(self.context())
        context.num_tickets = 0  # a worker that has nothing to read takes bytes for the end of the link
        context.verify_mode = ssl.CERT_REQUIRED
        path = environment.get(TLS_CA_FILE_VARIABLE) or None
        try:
            if path is None:
                context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
            else:
                context.load_verify_locations(path)
        except OSError as error:
            raise _unreadable_authority(path, error) from error
        return context

    def worker_context(self) -> ssl.SSLContext:
        """Return the settings of a worker's end of links; the caller compares the learner's fingerprint."""
        context = _for_links(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(self.chain, self.key, password=_no_password)
        return context

    def fingerprint(self) -> str:
        """Return the SHA-256 of the certificate, in hex."""
        return hashlib.sha256(self._own().public_bytes(Encoding.DER)).hexdigest()

    def expiry(self) -> datetime:
        """Return when the certificate expires."""
        return self._own().not_valid_after_utc

    def _own(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(Path(self.chain).read_bytes())


def host_and_port(base_url: str) -> tuple[str, int]:
    """Return the host and the port of `http://host:port`."""
    parts = urlsplit(base_url)
    return parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]


def is_loopback(host: str) -> bool:
    """Whether `host` means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_free(port: int) -> bool:
    """Whether a server may listen at a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just given up is free
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def is_tls(base_url: str) -> bool:
    """Whether a server is reached over TLS."""
    return base_url.startswith(SCHEME)


def trust(base_url: str, environment: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the settings that check a server of https://; None for one of http://.

    It must show a certificate for the host of its base_url, signed by an authority in the file that STAGE2_TLS_CA_FILE
    names; if that is not set, by one that this machine trusts.

    Raises:
        ConfigError: the file cannot be read, or holds no certificate.
    """
    if not is_tls(base_url):
        return None
    path = environment.get(TLS_CA_FILE_VARIABLE) or None
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        raise _unreadable_authority(path, error) from error


def own_certificate(environment: Mapping[str, str]) -> Certificate | None:
    """Return this process's certificate; None if STAGE2_TLS_CERT_FILE is not set.

    Raises:
        ConfigError: a file cannot be read, key and certificate are no pair, or the certificate has expired.
    """
    chain, key = environment.get(TLS_CERT_FILE_VARIABLE), environment.get(TLS_KEY_FILE_VARIABLE)
    if not chain:
        return None
    if not key:
        rule = f"must name the key of the certificate that {TLS_CERT_FILE_VARIABLE} names"
        raise refused(TLS_KEY_FILE_VARIABLE, key, rule, _CERT_WAY_OUT)
    certificate = Certificate(chain, key)
    try:
        certificate.context()
        until = certificate.expiry()
    except (OSError, ValueError) as error:
        rule = f"must be a certificate whose key is {key}, both readable, in PEM form, without a password"
        problem = Problem(TLS_CERT_FILE_VARIABLE, chain, f"{rule} ({error_reason(error)})", _CERT_WAY_OUT)
        raise ConfigError((problem,)) from error
    if until < datetime.now(UTC):
        problem = Problem(TLS_CERT_FILE_VARIABLE, chain, f"has expired at {until:%Y-%m-%d %H:%M} UTC", _CERT_WAY_OUT)
        raise ConfigError((problem,))
    return certificate


def required_certificate(base_url: str, environment: Mapping[str, str]) -> Certificate | None:
    """Return the certificate that a server of this base_url, and its learner, must have; None for http://.

    Raises:
        ConfigError: as `own_certificate`, and if there is none for https://.
    """
    if not is_tls(base_url):
        return None
    certificate = own_certificate(environment)
    if certificate is None:
        rule = f"must name a certificate for a server whose base_url is {base_url}, and for its learner"
        raise refused(TLS_CERT_FILE_VARIABLE, None, rule, f"{_CERT_WAY_OUT}, or write http://")
    return certificate


def explain_tls_error(error: BaseException, base_url: str, environment: Mapping[str, str]) -> str | None:
    """Return what is wrong between this side's TLS and a server's, with the way out; None for any other error."""
    # Only OpenSSL's own errors have a reason: aiohttp wraps them in subclasses of its own.
    found = next((one for one in _causes(error) if isinstance(one, ssl.SSLError) and hasattr(one, "reason")), None)
    if found is None:
        return None
    if not isinstance(found, ssl.SSLCertVerificationError):
        if found.reason in _NO_TLS:
            return f"it answers without TLS: write http:// in its base_url, or start it with {TLS_CERT_FILE_VARIABLE}"
        return f"no TLS with it: {error_reason(found)}"
    if found.verify_code in (_EXPIRED, _NOT_YET_VALID):
        return (
            f"its certificate is not valid now ({found.verify_message}): give it a new one, which a job gets when it "
            "is suspended and resumed, or set the clock of this machine"
        )
    if found.verify_code in (_OTHER_HOST, _OTHER_ADDRESS):
        host, _ = host_and_port(base_url)
        return f"its certificate is not for {host}: write a name in its base_url that is in its certificate"
    path = environment.get(TLS_CA_FILE_VARIABLE)
    trusted = f"the authority in {path}" if path else "an authority that this machine trusts"
    return (
        f"its certificate is not of {trusted} ({found.verify_message}): a stranger answers there, or set "
        f"{TLS_CA_FILE_VARIABLE} to the authority of its certificate"
    )


def explain_hang_up(base_url: str) -> str | None:
    """Return why a server of http:// may have closed a connection: it answers over TLS alone. None otherwise."""
    if is_tls(base_url) or not _speaks_tls(base_url):
        return None
    return "it answers over TLS alone: write https:// in its base_url"


def error_reason(error: BaseException) -> str:
    """Return the core of an error of the network or of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _for_links(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # from Python 3.12 on; no effect on a kernel without it
    return context


def _unreadable_authority(path: str | None, error: OSError) -> ConfigError:
    rule = f"must be a readable file with certificates in PEM form ({error_reason(error)})"
    return refused(TLS_CA_FILE_VARIABLE, path, rule, _CA_WAY_OUT)


def _speaks_tls(base_url: str) -> bool:
    """Whether the server shakes hands. Nothing is sent to it, so it need not prove who it is."""
    host, port = host_and_port(base_url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), timeout=PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except OSError:
        return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def _no_password() -> str:
    """Answer for an encrypted key, instead of OpenSSL's prompt on the terminal."""
    return ""
