"""What NCCL chose to carry weights: a network, NVLink (P2P) or shared memory. Only NCCL's own log names it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import MutableMapping
from pathlib import Path

logger = logging.getLogger(__name__)

LEVEL, FILE = "NCCL_DEBUG", "NCCL_DEBUG_FILE"
VIA = re.compile(r" NCCL INFO Channel .* via (\S+)")  # NCCL 2.29, src/transport


def log_into(folder: Path, environment: MutableMapping[str, str]) -> None:
    """Have NCCL log into a folder, before its first call in this process; not where a person has asked for its log."""
    if LEVEL not in environment:
        environment.update({LEVEL: "INFO", FILE: str(folder / "%p")})


def log_links() -> None:
    """Log what NCCL chose, if its log is in a file. It connects members in the first call that sends something."""
    path = Path(os.environ.get(FILE, "").replace("%p", str(os.getpid())))
    if path.is_file() and (links := sorted(set(VIA.findall(path.read_text(errors="replace"))))):
        logger.info("NCCL moves weights via %s", ", ".join(links))
