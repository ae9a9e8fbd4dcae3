"""The ways that NCCL chose between the members of a group, such as NET/IB or P2P/CUMEM, as its own log reports them.

No call of NCCL reports them. With NCCL_DEBUG=INFO it writes a line for each channel, at the latest at the first
broadcast: `... NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/3/GDRDMA`. Source: NCCL's net.cc, p2p.cc and
shm.cc (src/transport). An unreadable log leaves the ways unknown; nothing in a run depends on them.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

logger = logging.getLogger(__name__)

LEVEL, PARTS, FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
LARGEST_BYTES = 2**20  # that are read of a log; a channel has a line of some 100
MOST_WAYS = 4
_LINE = re.compile(
    rb"NCCL INFO Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via ([^\r\n]+)"
)
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_ .-]{0,31}")


@contextmanager
def logging_nccl_choices(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Make NCCL, which this process has not used yet, log its choices to a file of its own within the block.

    If the environment sets NCCL's log already, that stands; its file is read, if it names one.
    """
    if LEVEL in environment or FILE in environment:
        yield
        return
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(TemporaryDirectory(prefix="stage2-nccl-", ignore_cleanup_errors=True))
        except OSError as error:
            logger.info("the ways that NCCL chooses will be unknown: no temporary folder: %s", error)
            yield
            return
        own = {LEVEL: "INFO", PARTS: environment.get(PARTS, "INIT"), FILE: f"{folder}/log.%p"}
        before = {name: environment.get(name) for name in own}
        environment.update(own)
        try:
            yield
        finally:
            for name, value in before.items():
                environment.pop(name)
                if value is not None:
                    environment[name] = value


class NcclLog:
    """NCCL's log of this process, from `begin` on. path: None = it writes none that could be read."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._start = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> NcclLog:
        """Return the log that the environment names for this process; NCCL puts host and process for %h and %p."""
        name = environment.get(FILE)
        if not name:
            return cls(None)
        host = socket.gethostname().partition(".")[0]
        return cls(Path(name.replace("%h", host).replace("%p", str(os.getpid()))))

    def begin(self) -> None:
        """Forget what was written before: a group is about to be formed."""
        self._start = self._size()

    def ways(self) -> tuple[str, ...]:
        """Return the ways that were chosen since, in the order of their first mention; empty if the log names none."""
        return ways_in(self._text())

    def _size(self) -> int:
        """Return the bytes of the log; 0 where it is no ordinary file: reading a pipe would block."""
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return 0
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else 0

    def _text(self) -> bytes:
        if self._path is None or self._size() <= self._start:
            return b""
        try:
            with self._path.open("rb") as file:
                file.seek(self._start)
                return file.read(LARGEST_BYTES)
        except OSError:
            return b""


def ways_in(text: bytes) -> tuple[str, ...]:
    """Return the ways in lines of NCCL's log, in the order of first mention, without device numbers."""
    ways = (_way(match[1].decode(errors="replace")) for match in _LINE.finditer(text))
    return tuple(dict.fromkeys(filter(None, ways)))[:MOST_WAYS]


def _way(text: str) -> str | None:
    """Return a way without its details; None if it is none of NCCL's."""
    kind, *rest = text.split("/")
    if kind == "SHM":
        return kind
    name = _WORD.match(rest[0].partition(" comm ")[0]) if rest and kind in {"NET", "P2P"} else None
    if name is None:
        return None
    direct = "/GDRDMA" if any(part.startswith("GDRDMA") for part in rest) else ""  # without a copy in main memory
    return f"{kind}/{name[0].strip()}{direct}"
