"""Requests to running learners for their progress: a learner's pod holds no credentials to report by itself."""

import base64
import functools
import logging
import ssl
from http import HTTPStatus
from typing import Any

import aiohttp
from pydantic_core import from_json

from stage2_api.pod import layout
from stage2_api.pod.layout import PROGRESS_PORT, PROGRESS_ROUTE
from stage2_api.pod.report import LearnerReport, read_report
from stage2_controller.observed import Object, running
from stage2_controller.spec import credentials, names

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
        if pod is None or not address or secret is None or not running(pod, names.ROLE_LEARNER):
            return None
        token = base64.b64decode(secret["data"][layout.TOKEN_KEY]).decode()
        host = f"[{address}]" if ":" in address else address
        tls = _tls(secret, pod) if credentials.has_certificates(secret) else {}
        url = f"{'https' if tls else 'http'}://{host}:{self._port}{PROGRESS_ROUTE}"
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        try:
            # a redirect would lead the controller, and the token, to an address that the pod's owner chooses
            async with self._session.get(url, headers=headers, allow_redirects=False, **tls) as response:
                if response.status != HTTPStatus.OK:
                    raise ValueError(f"it answered {response.status}")
                document = from_json(await _content(response))  # it bounds depth, which json leaves to the stack
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.info("no progress from %s: %s", url, error)
            return None
        return read_report(document)


def _tls(secret: Object, pod: Object) -> dict[str, Any]:
    """Return what checks that the job's own learner answers: no other name's certificate is shown the token."""
    metadata = pod["metadata"]
    job = metadata["annotations"][names.ANNOTATION_JOB]
    context = _trusting(secret["data"][layout.CA_KEY])
    return {"ssl": context, "server_hostname": names.learner_host(job, metadata["namespace"])}


@functools.lru_cache(maxsize=1024)
def _trusting(authority: str) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=base64.b64decode(authority).decode())


async def _content(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > _LARGEST_BYTES:
            raise ValueError(f"it answered more than {_LARGEST_BYTES} bytes")
    return bytes(content)
