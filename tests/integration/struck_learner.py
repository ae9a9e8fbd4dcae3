"""A learner of one server that is struck in a phase of its push, or whose server is; `strikes` starts it.

    python -m tests.integration.struck_learner OPTIONS

OPTIONS are JSON. Asked to stop, it ends with exit code 75, as `main.learn` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from stage2_api.errors import EXIT_RETRYABLE
from stage2_api.vllm import ServerAddress
from stage2_trainer.process.interrupt import Interrupt, Interrupted
from stage2_trainer.sync.fleet.push import FullPush
from tests.integration import policies
from tests.integration.strikes import PUSHES, proved, when_it_comes_to
from tests.support.socket_communicator import sending_over


def arrange_the_blow(options: dict[str, Any]) -> None:
    if "blow" in options:
        when_it_comes_to(options["phase"], lambda: os.kill(os.getpid(), options["blow"]))
    else:
        when_it_comes_to(options["phase"], lambda: os.kill(options["stopped"], signal.SIGSTOP))


def learn(options: dict[str, Any]) -> None:
    """Push once."""
    push = PUSHES[options["push"]]
    model = Path(options["model"])
    policy = policies.trained(policies.load(model, getattr(torch, options["dtype"])), push.policy)
    probe = policies.grey_probe(model, Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))))
    address = ServerAddress(options["base_url"], options["group_port"])
    with sending_over(options["transport"]):
        sync = FullPush(
            [address],
            token=options["token"],
            timeout_s=options["timeout_s"],
            device=torch.device("cpu"),
            **push.options(),
        )
    arrange_the_blow(options)
    interrupt = Interrupt()
    interrupt.listen()
    with contextlib.closing(sync), interrupt.stoppable():
        proved(sync, probe).ensure_synced(policy, 1)


if __name__ == "__main__":
    try:
        learn(json.loads(sys.argv[1]))
    except Interrupted:
        sys.exit(EXIT_RETRYABLE)
