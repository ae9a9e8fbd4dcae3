"""What NCCL chose to carry weights: a network, NVLink (P2P) or shared memory. Only NCCL's own log names it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

logger = logging.getLogger(__name__)

LEVEL, FILE = "NCCL_DEBUG", "NCCL_DEBUG_FILE"
VIA = re.compile(r" NCCL INFO Channel .* via (\S+)")  # NCCL 2.29, src/transport


@contextmanager
def logged_into_a_file(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Have NCCL log into a file from its first call in this process on; not where a person has asked for its log."""
    if LEVEL in environment:
        yield
        return
    with TemporaryDirectory(prefix="stage2-nccl-") as folder:
        environment.update({LEVEL: "INFO", FILE: str(Path(folder) / "%p")})
        try:
            yield
        finally:
            del environment[LEVEL], environment[FILE]


def log_links() -> None:
    """Log what NCCL chose, if its log is in a file. It connects members in the first call that sends something."""
    path = Path(os.environ.get(FILE, "").replace("%p", str(os.getpid())))
    if path.is_file() and (links := sorted(set(VIA.findall(path.read_text(errors="replace"))))):
        logger.info("NCCL moves weights via %s", ", ".join(links))
