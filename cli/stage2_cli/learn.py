"""`stage2 learn` and `stage2 wait`: the learner's process, its restarts, and the wait for its servers.

With `--restarts` this process restarts the learner in the same container, which keeps its node and GPUs. A container
that ends frees both until its Job creates another pod.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stage2_api import log_lines
from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE, EXIT_UNAVAILABLE, ConfigError
from stage2_api.pod.layout import RESTARTS_VARIABLE, TERMINATION_LOG_VARIABLE
from stage2_api.runconfig import RunConfig
from stage2_api.vllm import ServerAddress
from stage2_cli.config_files import load_addressed
from stage2_cli.processes import end_with_parent
from stage2_trainer.process.activity import ACTIVITY

logger = logging.getLogger(__name__)

PAUSE_S = 10.0  # before the first restart; doubled each time, as a Job does
LONGEST_PAUSE_S = 360.0
LIST_AGAIN_S = 60.0  # between looks at the list of servers that are waited for


def learn_once(
    path: Path, processes: int, *, overwrite: bool, changes: Sequence[str] = (), node: str | None = None
) -> int:
    """Train in this process, or in `processes` processes of torchrun; return the exit code. Raises ConfigError.

    changes: of `--set`. node: which of several machines this is, as `Node.parse` reads it; each has so many processes.
    """
    config = load_addressed(path, changes)
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if processes > 1 or node or (config.uses_deepspeed and not launched):  # without torchrun DeepSpeed looks for MPI
        from stage2_trainer.main import check
        from stage2_trainer.process.torchrun import Node, run_processes

        this = Node.parse(node) if node else None
        if code := check(config, world_size=processes * (this.count if this else 1), overwrite=overwrite):
            return code  # every process would find this mistake
        return run_processes("stage2_cli", ["learn", str(path), *_again(changes)], processes=processes, node=this)
    if launched:  # torchrun's workers have their own sessions, which nobody else ends
        end_with_parent()
    from stage2_trainer.main import learn

    return learn(config, overwrite=overwrite, servers=ServerList(path, config, changes))


class ServerList:
    """The list of servers in a configuration file, which is read again when the file changes: servers come and go.

    config: what the file says now.
    """

    def __init__(self, path: Path, config: RunConfig, changes: Sequence[str] = ()) -> None:
        self._path = path
        self._changes = changes
        self._servers = config.rollout_matching.vllm.server.resolved_servers()
        self._read = self._stamp()

    def __call__(self) -> Sequence[ServerAddress]:
        """Return the servers that are listed now; the last list where the file is not valid any more."""
        if (stamp := self._stamp()) != self._read:
            self._read = stamp
            try:
                config = load_addressed(self._path, self._changes)
                self._servers = config.rollout_matching.vllm.server.resolved_servers() or self._servers
            except ConfigError as error:
                logger.warning("the list of servers is not valid, and the previous one stays in use: %s", error)
        return self._servers

    def _stamp(self) -> tuple[int, int] | None:
        """Return what changes with the content of a file, also behind a link; None of a pipe, which is read once."""
        try:
            found = self._path.stat()
        except OSError:
            return self._read
        return (found.st_ino, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def learn_with_restarts(
    path: Path, processes: int, restarts: int, *, overwrite: bool, changes: Sequence[str] = ()
) -> int:
    """Train in a child process, and restart it up to `restarts` times; return the exit code."""
    log_lines.configure(logging.INFO)
    command = [sys.executable, "-m", "stage2_cli", "learn", str(path), f"--processes={processes}", *_again(changes)]
    return Restarts(command, ["--overwrite"] if overwrite else []).run(restarts)


def _again(changes: Sequence[str]) -> list[str]:
    return [f"--set={change}" for change in changes]


def wait_for_servers(path: Path) -> None:
    """Return when all configured servers answer; the caller enforces the deadline. Raises ConfigError.

    A learner's pod runs this first, so that it holds its node and GPU while the servers load.
    """
    config = load_addressed(path)
    servers = ServerList(path, config)
    from stage2_trainer.wire.client import wait_until_healthy
    from stage2_trainer.wire.credentials import read_token
    from stage2_trainer.wire.errors import ServerError

    log_lines.configure(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # huggingface_hub's, which logs every request
    token, protocol = read_token(os.environ), config.rollout_matching.vllm.server.protocol
    with ACTIVITY.reported(lambda line: logger.info("%s", line) if line else None):
        while True:
            urls = [one.base_url for one in servers()]
            try:
                wait_until_healthy(urls, token, timeout_s=LIST_AGAIN_S, protocol=protocol)
                return
            except ServerError as error:
                if error.phase != "health":
                    raise


class Restarts:
    """Runs a command until it succeeds, must not be retried, is interrupted, or has used up its tries.

    first_only: arguments of the first try alone.
    """

    def __init__(self, command: Sequence[str], first_only: Sequence[str] = (), *, pause_s: float = PAUSE_S) -> None:
        self._command = command
        self._first_only = first_only
        self._pause_s = pause_s
        self._interrupted = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, restarts: int) -> int:
        """Return 0, 64 or 69 of the command, EXIT_RETRYABLE when interrupted, or EXIT_UNAVAILABLE after all tries."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._interrupt)
        for attempt in range(restarts + 1):
            code = self._try(attempt)
            if code in (os.EX_OK, EXIT_CONFIG, EXIT_UNAVAILABLE):  # 69 of a try: a package is missing
                return code
            if self._interrupted.is_set():
                return EXIT_RETRYABLE
            if attempt < restarts:
                pause_s = min(self._pause_s * 2.0**attempt, LONGEST_PAUSE_S)
                logger.warning(
                    "the learner ended with exit code %d; restarting in %g s (%d of %d)",
                    code,
                    pause_s,
                    attempt + 1,
                    restarts,
                )
                self._interrupted.wait(pause_s)
        logger.error("the learner ended with exit code %d after %d restarts, the limit", code, restarts)
        return EXIT_UNAVAILABLE

    def _try(self, attempt: int) -> int:
        _clear_termination_log()
        self._process = subprocess.Popen(
            [*self._command, *(() if attempt else self._first_only)],
            env={**os.environ, RESTARTS_VARIABLE: str(attempt)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        if self._interrupted.is_set():
            self._process.terminate()
        code = self._process.wait()
        with suppress(ProcessLookupError):  # a surviving worker would hold memory that the next attempt needs
            os.killpg(self._process.pid, signal.SIGKILL)
        return code

    def _interrupt(self, *_: object) -> None:
        self._interrupted.set()
        if self._process is not None:
            self._process.terminate()


def _clear_termination_log() -> None:
    """Empty the termination log, so that no earlier message explains a later exit."""
    path = os.environ.get(TERMINATION_LOG_VARIABLE)
    if path and Path(path).exists():
        Path(path).write_text("", encoding="utf-8")
