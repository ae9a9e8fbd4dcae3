"""A real OCI registry on this machine, Debian's docker-registry, to which tests push what they install."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.support.patience import Patience
from tests.support.ports import free_port

CONFIG = """\
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {storage}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def start(program: str, folder: Path) -> tuple[int, int]:
    """Start an empty one, without TLS, in a folder of its own; return its process and its port."""
    folder.mkdir()
    port = free_port()
    (folder / "config.yaml").write_text(CONFIG.format(storage=folder / "storage", port=port))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", folder / "config.yaml"], stdout=log, stderr=log)
    patience = Patience(60)
    while not patience.ended():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return process.pid, port
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.05)
    raise TimeoutError(f"{program} does not listen on port {port}")


def stop(pid: int, folder: Path) -> None:
    """End it, and remove what was pushed to it: gigabytes."""
    os.kill(pid, signal.SIGTERM)
    shutil.rmtree(folder)
