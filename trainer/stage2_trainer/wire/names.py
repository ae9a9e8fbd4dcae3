"""A server's address: the parts of its base_url."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

POLICY_MODEL = "policy"  # the name under which every server serves it
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes
MAX_LORA_RANK = LORA_RANKS[-1]


DEFAULT_PORTS = {"http": 80, "https": 443}


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
