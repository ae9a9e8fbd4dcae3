"""How long the event loop was kept from its tasks: one long computation for one job delays every other job."""

import asyncio
import logging
from collections.abc import Callable

INTERVAL_S = 0.05
TOLD_S = 1.0
"""A block of this length is logged as well as counted."""

logger = logging.getLogger(__name__)


async def watch(observe: Callable[[float], None]) -> None:
    """Tell again and again by how many seconds a short sleep was late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        late_s = loop.time() - due
        observe(late_s)
        if late_s > TOLD_S:
            logger.warning("the event loop stood still for %.1f s: all jobs waited for one computation", late_s)
