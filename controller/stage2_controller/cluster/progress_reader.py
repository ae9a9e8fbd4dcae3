"""Requests to running learners for their progress: a learner's pod holds no credentials to report by itself."""

import base64
import logging
from http import HTTPStatus

import aiohttp
from pydantic_core import from_json

from stage2_api.pod import files
from stage2_api.pod.ports import PROGRESS_PORT, PROGRESS_ROUTE
from stage2_api.pod.progress import LearnerReport, read_report
from stage2_controller.job import names
from stage2_controller.job.observed import Object, running

logger = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=3)
_LARGEST_BYTES = 256 << 10
"""A report has a few thousand bytes; whoever has the pod may answer with any number."""


class ProgressReader:
    """A client of GET /progress of learner pods, with each job's own bearer token."""

    def __init__(self, *, port: int = PROGRESS_PORT) -> None:
        self._port = port
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False)

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def read(self, pod: Object | None, secret: Object | None) -> LearnerReport | None:
        """Return the learner's report; None while it does not run, or does not answer in time."""
        address = pod.get("status", {}).get("podIP") if pod else None
        if not address or secret is None or not running(pod, names.ROLE_LEARNER):
            return None
        token = base64.b64decode(secret["data"][files.TOKEN_KEY]).decode()
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self._port}{PROGRESS_ROUTE}"
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        try:
            # a redirect would lead the controller, and the token, to an address that the pod's owner chooses
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status != HTTPStatus.OK:
                    raise ValueError(f"it answered {response.status}")
                document = from_json(await _content(response))  # it bounds depth, which json leaves to the stack
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.info("no progress from %s: %s", url, error)
            return None
        return read_report(document)


async def _content(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > _LARGEST_BYTES:
            raise ValueError(f"it answered more than {_LARGEST_BYTES} bytes")
    return bytes(content)
