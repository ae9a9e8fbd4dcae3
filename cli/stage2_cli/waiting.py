"""`stage2 wait CONFIG`: the wait for rollout servers, apart from the learner that needs them.

In a learner's pod it runs before the learner: the pod has its node and its GPU while the servers still load.
"""

from __future__ import annotations

import logging
import os

from stage2_api import log_lines
from stage2_api.runconfig import RunConfig
from stage2_trainer.wire.client import wait_for_ever
from stage2_trainer.wire.credentials import read_token


def wait_for_servers(config: RunConfig) -> None:
    """Return when all servers of the configuration answer; without a deadline, which is its caller's to keep."""
    log_lines.configure(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request
    server = config.rollout_matching.vllm.server
    urls = [address.base_url for address in server.resolved_servers()]
    wait_for_ever(urls, read_token(os.environ), protocol=server.protocol)
