"""TLS between learner and servers: whose certificates are believed, with which one this process answers, what failed.

A server's base_url says whether it is asked over TLS. The files are named by variables, as the token's is: a job's pods
get them from the controller, a person names their own.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from stage2_api.errors import ConfigError, Problem
from stage2_api.pod.layout import (
    TLS_CA_FILE_VARIABLE,
    TLS_CERT_FILE_VARIABLE,
    TLS_KEY_FILE_VARIABLE,
    TOKEN_FILE_VARIABLE,
)
from stage2_trainer.wire.names import host_and_port

WAY_OUT = (
    "write a token to a file that only you can read (`openssl rand -hex 32 > token; chmod 600 token`) "
    f"and set {TOKEN_FILE_VARIABLE} to its path for the servers and the learner"
)


def read_token(environment: Mapping[str, str]) -> str:
    """Return the token in the file that STAGE2_TOKEN_FILE names.

    Raises:
        ConfigError: the variable is not set, the file cannot be read, or it is empty.
    """
    path = environment.get(TOKEN_FILE_VARIABLE, "")
    if not path:
        raise _problem("", "must name a file that holds the bearer token")
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise _problem(path, f"must be a readable file ({error.strerror})") from error
    if not token:
        raise _problem(path, "must not be empty")
    return token


def _problem(value: str, rule: str) -> ConfigError:
    return ConfigError((Problem(path=TOKEN_FILE_VARIABLE, value=value, rule=rule, way_out=WAY_OUT),))


SCHEME = "https://"
PROBE_S = 2.0
# Of OpenSSL: what X509_verify_cert found (x509_vfy.h).
_NOT_YET_VALID, _EXPIRED, _OTHER_HOST, _OTHER_ADDRESS = 9, 10, 62, 64
# What it makes of an answer that is no TLS.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"})


@dataclass(frozen=True)
class Certificate:
    """The files by which a process proves who it is: a chain of certificates, its own first, and its private key."""

    chain: str
    key: str

    def context(self) -> ssl.SSLContext:
        """Return the listening side's settings."""
        made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        made.load_cert_chain(self.chain, self.key, password=_no_password)
        return made


def is_tls(base_url: str) -> bool:
    """Whether a server is asked over TLS."""
    return base_url.startswith(SCHEME)


def trust(base_url: str, environment: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return how a server of https:// is checked, None for one of http://.

    It must show a certificate for the host of its base_url, of the authorities in the file that STAGE2_TLS_CA_FILE
    names; where it is not set, of those that this machine trusts.

    Raises:
        ConfigError: the file cannot be read, or holds no certificate.
    """
    if not is_tls(base_url):
        return None
    path = environment.get(TLS_CA_FILE_VARIABLE) or None
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        rule = f"must be a readable file with certificates in PEM form ({_reason(error)})"
        raise ConfigError((Problem(TLS_CA_FILE_VARIABLE, path, rule, _CA_WAY_OUT),)) from error


def own_certificate(environment: Mapping[str, str]) -> Certificate | None:
    """Return with what this process answers over TLS; None where STAGE2_TLS_CERT_FILE is not set.

    Raises:
        ConfigError: a file cannot be read, key and certificate are no pair, or the certificate has expired.
    """
    chain, key = environment.get(TLS_CERT_FILE_VARIABLE), environment.get(TLS_KEY_FILE_VARIABLE)
    if not chain:
        return None
    if not key:
        rule = f"must name the key of the certificate that {TLS_CERT_FILE_VARIABLE} names"
        raise ConfigError((Problem(TLS_KEY_FILE_VARIABLE, key, rule, _CERT_WAY_OUT),))
    found = Certificate(chain, key)
    try:
        found.context()
        until = x509.load_pem_x509_certificate(Path(chain).read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        rule = f"must be a certificate whose key {key} is, both readable, in PEM form, without a password"
        problem = Problem(TLS_CERT_FILE_VARIABLE, chain, f"{rule} ({_reason(error)})", _CERT_WAY_OUT)
        raise ConfigError((problem,)) from error
    if until < datetime.now(UTC):
        problem = Problem(TLS_CERT_FILE_VARIABLE, chain, f"has expired at {until:%Y-%m-%d %H:%M} UTC", _CERT_WAY_OUT)
        raise ConfigError((problem,))
    return found


def required_certificate(base_url: str, environment: Mapping[str, str]) -> Certificate | None:
    """Return with what a server of this base_url answers; None for http://.

    Raises:
        ConfigError: as `own_certificate`, and where a server of https:// has none.
    """
    if not is_tls(base_url):
        return None
    found = own_certificate(environment)
    if found is None:
        rule = f"must name a certificate for a server whose base_url is {base_url}"
        raise ConfigError((Problem(TLS_CERT_FILE_VARIABLE, None, rule, f"{_CERT_WAY_OUT}, or write http://"),))
    return found


def explained(error: BaseException, base_url: str, environment: Mapping[str, str]) -> str | None:
    """Return what is wrong between this side's TLS and a server's, with the way out; None if it is something else."""
    # Only OpenSSL's own have a reason: aiohttp has subclasses of its own around them.
    found = next((one for one in _causes(error) if isinstance(one, ssl.SSLError) and hasattr(one, "reason")), None)
    if found is None:
        return None
    if not isinstance(found, ssl.SSLCertVerificationError):
        if found.reason in _NO_TLS:
            return f"it answers without TLS: write http:// in its base_url, or start it with {TLS_CERT_FILE_VARIABLE}"
        return f"no TLS with it: {_reason(found)}"
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


def wants_tls(base_url: str) -> str | None:
    """Return what is wrong with a server of http:// that has ended a connection: it may answer over TLS alone."""
    if is_tls(base_url) or not _speaks_tls(base_url):
        return None
    return "it answers over TLS alone: write https:// in its base_url"


def _speaks_tls(base_url: str) -> bool:
    """Whether it shakes hands. Nothing is sent to it, so it need not prove who it is."""
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
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        yield at
        seen.add(id(at))
        at = at.__cause__ or at.__context__


def _no_password() -> str:
    """Instead of a question on the terminal."""
    return ""


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


_CA_WAY_OUT = f"set {TLS_CA_FILE_VARIABLE} to the certificate of the authority that the servers' certificates are of"
_CERT_WAY_OUT = (
    f"set {TLS_CERT_FILE_VARIABLE} and {TLS_KEY_FILE_VARIABLE} to a certificate for the host of base_url and its key"
)
