"""Local processes instead of containers, each with a log, a process group, GPUs and ports.

The kernel ends a child when the executor dies (PR_SET_PDEATHSIG), so that not even `kill -9` leaves servers behind.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stage2_api.errors import refused
from stage2_api.job import RolloutMatchingJob
from stage2_api.log_lines import split_lines
from stage2_api.pod.layout import PROGRESS_PORT
from stage2_controller.job.containers import POD_PORTS, LearnerPorts
from stage2_trainer.process.cuda_driver import VISIBLE_VARIABLE, gpu_count, visible_names
from stage2_trainer.wire.credentials import is_free

_PR_SET_PDEATHSIG = 1
PART = 1 << 16  # bytes of a log that are read at once
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies; call it in the child."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def log_lines(work_dir: Path, *, servers: bool, follow: bool) -> Iterator[str]:
    """Yield the lines that the learner of a run, or its servers, have logged. Raises ConfigError without any."""
    pattern = "server-*.log" if servers else "learner.log"
    files = sorted(work_dir.glob(f"logs/{pattern}"))
    if not files:
        way_out = f"name the --work-dir of a run; for a job of a cluster: stage2 job logs {work_dir}"
        raise refused("RUN", str(work_dir), f"must be a folder with logs/{pattern}", way_out)
    more = ["--follow=name"] if follow else []
    with subprocess.Popen(["tail", "--lines=+1", *more, *files], stdout=subprocess.PIPE) as tail:
        assert isinstance(tail.stdout, io.BufferedReader)
        yield from split_lines(iter(partial(tail.stdout.read1, PART), b""))


@dataclass
class LocalProcess:
    """One container as a process.

    name: as in the plan (`server-0`, `learner`); log: where its output is appended.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the process with exactly its own environment."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                list(self.command),
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def stop(self, *, grace_s: float = 15.0) -> None:
        """Send SIGTERM to the whole group, then SIGKILL after `grace_s` seconds, or at once after another Ctrl-C."""
        if self.process is None:
            return
        try:
            with suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(self.process.pid, signal.SIGTERM)
                deadline = time.monotonic() + grace_s
                while time.monotonic() < deadline:
                    self.process.poll()
                    os.killpg(self.process.pid, 0)
                    time.sleep(0.05)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def tail(self) -> str:
        """Return the last 20 lines of its log."""
        if not self.log.exists():
            return ""
        with self.log.open(encoding="utf-8", errors="replace") as text:
            return "".join(deque(text, maxlen=20))


_FIRST_GROUP_PORT = 21216
"""Lies below Linux's ephemeral ports, so that no outgoing connection takes a chosen port."""
_PORTS_PER_RUN = 20
_MOST_RUNS = 50


@contextmanager
def learner_ports(servers: int) -> Iterator[LearnerPorts]:
    """Yield ports for a learner with this many servers, reserved until the block ends.

    Raises OSError if fifty runs hold ports.
    """
    with ExitStack() as claims:
        for run in range(_MOST_RUNS):
            claim = claims.enter_context(socket.socket(socket.AF_UNIX))
            try:
                # The learner binds its ports much later. Until then this abstract socket, which ends with the process,
                # reserves them.
                claim.bind(f"\0stage2-run-{run}")
            except OSError:
                continue
            by = run * _PORTS_PER_RUN
            ports = LearnerPorts(POD_PORTS.progress + by, POD_PORTS.metrics + by, _FIRST_GROUP_PORT + by)
            if all(map(is_free, [ports.progress, ports.metrics, *(ports.group + index for index in range(servers))])):
                yield ports
                return
        raise OSError(f"no free ports for a learner: {_MOST_RUNS} sets from {PROGRESS_PORT} on are taken")


def asks_for_gpus(job: RolloutMatchingJob) -> bool:
    """Whether a job asks for GPUs, by a resource or by claims."""
    spec = job.spec
    return bool(spec.gpu_resource or spec.rollout.resource_claim_template or spec.learner.resource_claim_template)


@contextmanager
def gpus_hidden(wanted: bool) -> Iterator[None]:
    """Hide all GPUs from this process and its children until the block ends, if that is wanted."""
    before = os.environ.get(VISIBLE_VARIABLE)
    if wanted:
        os.environ[VISIBLE_VARIABLE] = ""
    try:
        yield
    finally:
        os.environ.pop(VISIBLE_VARIABLE, None)
        if before is not None:
            os.environ[VISIBLE_VARIABLE] = before


def require_gpus(count: int, environment: Mapping[str, str] = os.environ, *, found: int | None = None) -> None:
    """Raise ConfigError if this machine has, or CUDA_VISIBLE_DEVICES names, fewer GPUs than the job needs.

    found: the GPUs of the machine, counted by default. An empty CUDA_VISIBLE_DEVICES asks for the CPU. One that
    names enough is accepted where there is a GPU: parts of a GPU (MIG) are not counted.
    """
    visible = visible_names(environment)
    if visible and len(visible) < count:
        rule, way_out = f"must name as many GPUs as the job needs, which is {count}", "name more, or unset it"
        raise refused(VISIBLE_VARIABLE, ",".join(visible), rule, way_out)
    here = gpu_count() if found is None else found
    if visible != [] and here < (min(count, 1) if visible else count):
        rule = f"servers and learner need all of them on this machine, which has {here}"
        way_out = "run it on a machine that has them, or on the CPU with --cpu, which suits tiny models alone"
        raise refused("spec.rollout, spec.learner", f"{count} GPUs", rule, way_out)


def visible_devices(gpus: Iterable[int], environment: Mapping[str, str] = os.environ) -> str:
    """Return CUDA_VISIBLE_DEVICES for these GPUs, which are indices into the visible GPUs of this process."""
    visible = visible_names(environment)
    return ",".join(str(gpu) if visible is None else visible[gpu] for gpu in gpus) if visible != [] else ""
