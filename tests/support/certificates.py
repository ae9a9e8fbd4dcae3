"""Certificates as a job has them, in files as its pods find them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from stage2_api.pod.layout import TLS_CA_FILE_VARIABLE, TLS_CERT_FILE_VARIABLE, TLS_KEY_FILE_VARIABLE
from stage2_controller.job import credentials

HOST = "localhost"
_ROLE = "rollout"


@dataclass(frozen=True)
class Files:
    """An authority's certificate, one of a server's that it has signed, and the server's key."""

    authority: Path
    certificate: Path
    key: Path

    def environment(self) -> Mapping[str, str]:
        """The environment of a server."""
        return {**self.trust(), TLS_CERT_FILE_VARIABLE: str(self.certificate), TLS_KEY_FILE_VARIABLE: str(self.key)}

    def trust(self) -> Mapping[str, str]:
        """The environment of a client."""
        return {TLS_CA_FILE_VARIABLE: str(self.authority)}


def make(folder: Path, host: str = HOST, *, at: datetime | None = None) -> Files:
    """Write a new authority, and a server's certificate of it for a host; as if at another time."""
    files = credentials.new({_ROLE: (host,)}, at or datetime.now(UTC))
    folder.mkdir(parents=True, exist_ok=True)
    names = ("ca.crt", f"{_ROLE}.crt", f"{_ROLE}.key")
    for name in names:
        (folder / name).write_text(files[name])
    return Files(*(folder / name for name in names))
