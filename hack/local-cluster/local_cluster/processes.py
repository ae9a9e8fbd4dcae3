"""Starts daemons and finds them again: by a record of pid and start time, or by the mark in their environment."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from local_cluster.layout import MARKER, ClusterError, Layout

TAIL_LINES = 20
NAMESPACES = "namespaces"
"""The process whose namespaces are a further node's: its network, and its mounts."""


@dataclass(frozen=True)
class Daemon:
    """A started process; pid and start time (clock ticks since boot) together never name another one."""

    name: str
    pid: int
    start: int

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return start_time(self.pid) == self.start


def start_time(pid: int) -> int | None:
    """Start time in clock ticks since boot (proc(5), /proc/pid/stat field 22), or None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def on(layout: Layout, *argv: str) -> list[str]:
    """Return the command line that runs a command in a node's namespaces; the first node's are the machine's."""
    if layout.number == 1:
        return [*argv]
    (holder,) = named(layout, NAMESPACES)
    return ["nsenter", f"--target={holder.pid}", "--mount", "--net", *argv]


def spawn(layout: Layout, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> Daemon:
    """Start `argv` on its node in a session of its own, its output in the component's log, and record it."""
    layout.logs.mkdir(parents=True, exist_ok=True)
    layout.records.mkdir(parents=True, exist_ok=True)
    command, added = [str(part) for part in argv], dict(env or {})
    environment = {**os.environ, **added, MARKER: str(layout.home)}
    with log_path(layout, name).open("ab") as log:
        process = subprocess.Popen(
            command if name == NAMESPACES else on(layout, *command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    daemon = Daemon(name, process.pid, start_time(process.pid) or 0)
    record = {"pid": daemon.pid, "start": daemon.start, "argv": command, "env": added}
    (layout.records / f"{name}.json").write_text(json.dumps(record))
    return daemon


def respawn(layout: Layout, dead: Daemon) -> Daemon:
    """Start a process again as it was started; the others, and what it keeps on disk, stay as they are."""
    record = json.loads((layout.records / f"{dead.name}.json").read_text())
    return spawn(layout, dead.name, record["argv"], env=record["env"])


def recorded(layout: Layout) -> list[Daemon]:
    """Every process that was started, in the order of their names; a record cut short by a crash is skipped."""
    daemons = []
    for path in sorted(layout.records.glob("*.json")):
        text = path.read_text()
        if text.endswith("}"):
            record = json.loads(text)
            daemons.append(Daemon(path.stem, record["pid"], record["start"]))
    return daemons


def named(layout: Layout, name: str) -> list[Daemon]:
    """The process of that name, if one was started."""
    return [daemon for daemon in recorded(layout) if daemon.name == name]


def forget(layout: Layout, daemon: Daemon) -> None:
    """Drop the record of a process that was ended on purpose."""
    (layout.records / f"{daemon.name}.json").unlink()


def marked(layout: Layout) -> list[Daemon]:
    """Every live process with this cluster's mark: also containerd's shims, and those whose record a crash has lost."""
    mark = f"{MARKER}={layout.home}".encode()
    return [Daemon("marked", pid, start) for pid, start in _processes() if mark in _environment(pid)]


def in_use(folder: Path) -> bool:
    """Whether a live process runs a program that lies in the folder."""
    return any(program.is_relative_to(folder.resolve()) for program in _programs())


def _programs() -> Iterator[Path]:
    for pid, _ in _processes():
        # It may have ended since; a thread of the kernel has no program.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            yield Path(f"/proc/{pid}/exe").readlink()


def _processes() -> Iterator[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (start := start_time(int(entry))) is not None:
            yield int(entry), start


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def stop(daemons: Sequence[Daemon], *, grace_s: float = 5.0) -> None:
    """Ask each process to end, and kill after `grace_s` seconds those that have not."""
    for sig, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for daemon in daemons:
            if daemon.alive():
                with suppress(ProcessLookupError):  # it may end meanwhile, which is what was wanted
                    os.kill(daemon.pid, sig)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and any(daemon.alive() for daemon in daemons):
            _reap()
            time.sleep(0.05)


def _reap() -> None:
    # No child at all: they were started by an earlier command, and init reaps them.
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def log_path(layout: Layout, name: str) -> Path:
    """The log of one component."""
    return layout.logs / f"{name}.log"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, or a remark that there is none."""
    if not path.exists():
        return f"({path} does not exist)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def wait_until(
    layout: Layout,
    ready: Callable[[], bool],
    *,
    what: str,
    daemon: Daemon,
    timeout_s: float = 60.0,
    every_s: float = 0.2,
) -> None:
    """Wait for `ready`; raise with the last lines of the daemon's log when it ends or time runs out."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        _reap()
        reason = "has ended" if not daemon.alive() else "is not ready in time" if time.monotonic() > deadline else None
        if reason:
            path = log_path(layout, daemon.name)
            raise ClusterError(f"{what}: {daemon.name} {reason}. The end of {path}:\n{tail(path)}")
        time.sleep(every_s)


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command to its end and return its output; raise with its error output when it fails."""
    result = subprocess.run(
        [str(part) for part in argv],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        check=False,
    )
    if check and result.returncode:
        command = " ".join(str(part) for part in argv[:6])
        raise ClusterError(f"`{command} …` failed with exit code {result.returncode}:\n{result.stderr.strip()[-2000:]}")
    return result.stdout
