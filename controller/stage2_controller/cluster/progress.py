"""The progress of running learners, requested beside the passes, so that a slow learner delays no other job.

A learner's pod holds no credentials for the API server, so the controller polls it over HTTP.
"""

import asyncio
import base64
import functools
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
from pydantic_core import from_json

from stage2_api.pod import layout
from stage2_api.pod.layout import PROGRESS_PORT, PROGRESS_ROUTE
from stage2_api.pod.report import LearnerReport, read_report
from stage2_controller.job import credentials, names
from stage2_controller.job.names import Key
from stage2_controller.state.observed import Object, running

logger = logging.getLogger(__name__)

_AT_ONCE = 32  # learners that are polled at the same time
_SILENT_LIMIT, _SILENT_AT_FIRST_LIMIT = 3, 30  # requests without a report; a learner that starts imports for long
_TIMEOUT = aiohttp.ClientTimeout(total=3)
_LARGEST_BYTES = 256 << 10
"""A report has a few thousand bytes, but the owner of the pod may send any number."""


Servers = frozenset[tuple[str, str, int]]
"""The server processes that ran, as `Observed.server_processes` names them."""


@dataclass(frozen=True)
class _Question:
    """What was known when a learner was asked. pod: its uid: a report of an earlier pod does not count."""

    pod: str
    servers: Servers


@dataclass(frozen=True)
class _LastReport:
    asked: _Question
    report: LearnerReport | None
    at: float
    first: LearnerReport | None = None  # the first one since the same servers were seen
    silent: int = 0  # requests in a row without a report
    answered_at: float | None = None  # None: never
    problem: str = ""  # why the last request brought none


class Unreachable(Exception):
    """A learner gave no report; the text says why. unheard: nobody listens at its address."""

    def __init__(self, why: str, *, unheard: bool = False) -> None:
        super().__init__(why)
        self.unheard = unheard


class ProgressPolls:
    """The last report of every running learner, no older than about `interval_s` where passes ask as often.

    `changed` is called with the key of a job whose report has changed.
    """

    def __init__(
        self,
        reader: "ProgressReader",
        changed: Callable[[Key], None],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._changed = changed
        self._fresh_s = interval_s / 2
        self._clock = clock
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._kept: dict[Key, _LastReport] = {}
        self._asking: dict[Key, tuple[_Question, asyncio.Task[None]]] = {}

    def latest(self, key: Key, pod: Object | None, secret: Object | None, servers: Servers) -> LearnerReport | None:
        """Return the last report of the learner in this pod; an old one is renewed in the background.

        servers: those that run now. If they are others than before, the learner is asked at once.
        """
        if pod is None or secret is None or not running(pod, names.ROLE_LEARNER):
            self.forget(key)
            return None
        question = _Question(pod["metadata"]["uid"], servers)
        if key in self._kept and self._kept[key].asked.pod != question.pod:
            self.forget(key)
        known = self._kept.get(key)
        if key in self._asking and self._asking[key][0] != question:
            self._stop_asking(key)
        is_fresh = known and known.asked == question and self._clock() - known.at < self._fresh_s
        if key not in self._asking and not is_fresh:
            self._asking[key] = question, asyncio.create_task(self._ask(key, question, pod, secret))
        return known.report if known else None

    def baseline(self, key: Key, servers: Servers) -> LearnerReport | None:
        """Return the learner's first report that it was asked for after all of these servers were seen to run."""
        known = self._kept.get(key)
        return known.first if known and known.asked.servers == servers else None

    def unreachable(self, key: Key) -> str | None:
        """Return why the job's learner is not reached for several requests in a row; None while it is."""
        kept = self._kept.get(key)
        limit = _SILENT_AT_FIRST_LIMIT if kept is None or kept.answered_at is None else _SILENT_LIMIT
        return kept.problem if kept and kept.silent >= limit else None

    def report_age_s(self, key: Key) -> float | None:
        """Return the seconds since the job's learner last gave a report; None if it has not, or does not run."""
        kept = self._kept.get(key)
        return None if kept is None or kept.answered_at is None else self._clock() - kept.answered_at

    def forget(self, key: Key) -> None:
        """Drop the report of a job that has no running learner any more."""
        self._kept.pop(key, None)
        self._stop_asking(key)

    def _stop_asking(self, key: Key) -> None:
        if key in self._asking:
            self._asking.pop(key)[1].cancel()

    async def close(self) -> None:
        """End all requests."""
        for key in list(self._asking):
            self.forget(key)
        await self._reader.close()

    async def _ask(self, key: Key, question: _Question, pod: Object, secret: Object) -> None:
        report, problem, unheard = None, "", False
        try:
            async with self._gate:
                report = await self._reader.read(pod, secret)
        except Exception as error:  # after a bug in reading one report the learner must be polled again
            problem, unheard = str(error), isinstance(error, Unreachable) and error.unheard
            if not isinstance(error, Unreachable):
                logger.exception("%s: the learner's report cannot be read", key)
        kept, known = self._kept.get(key), self.unreachable(key)
        before = kept if kept and kept.asked.pod == question.pod else _LastReport(question, None, 0.0)
        silent, now = before.silent + 1 if problem else 0, self._clock()
        if unheard and before.report is not None and not _has_ended(before.report):
            silent = _SILENT_LIMIT  # its process is gone: in the same pod the next one loads
        first = (before.first if before.asked == question else None) or report
        answered_at = before.answered_at if problem else now
        self._kept[key] = _LastReport(question, report, now, first, silent, answered_at, problem)
        self._asking.pop(key, None)
        if (report, self.unreachable(key)) != (before.report, known):
            self._changed(key)


def _has_ended(report: LearnerReport) -> bool:
    """Return whether a learner had done its last step: its process ends a moment before its container."""
    return report.phase in ("done", "failed") or 0 < report.max_steps <= report.step


class ProgressReader:
    """A client for GET /progress of learner pods, with each job's own bearer token."""

    def __init__(self, *, port: int = PROGRESS_PORT) -> None:
        self._port = port
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False)

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def read(self, pod: Object, secret: Object) -> LearnerReport:
        """Return the report of a learner that runs. Raise Unreachable."""
        address = pod["status"].get("podIP", "")
        token = base64.b64decode(secret["data"][layout.TOKEN_KEY]).decode()
        host = f"[{address}]" if ":" in address else address
        tls = _tls(secret, pod) if credentials.has_certificates(secret) else {}
        url = f"{'https' if tls else 'http'}://{host}:{self._port}{PROGRESS_ROUTE}"
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        try:
            # A redirect would send the token to an address that the pod's owner chooses.
            async with self._session.get(url, headers=headers, allow_redirects=False, **tls) as response:
                if response.status != HTTPStatus.OK:
                    raise ValueError(f"it answered {response.status}")
                document = from_json(await _content(response))  # unlike json it bounds the depth
        except aiohttp.ClientConnectorCertificateError as error:
            metadata = secret["metadata"]
            anew = f"kubectl delete secret {metadata['name']} -n {metadata['namespace']}"
            why = f"the pod has other certificates than the job's Secret, and {anew} restarts the job with new ones"
            raise Unreachable(f"{url}: {error.certificate_error}: {why}") from error
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"{url}: {error}", unheard=isinstance(error.os_error, ConnectionRefusedError)) from error
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unreachable(f"{url}: {str(error) or type(error).__name__}") from error
        if (report := read_report(document)) is None:
            raise Unreachable(f"{url}: it answered no report")
        return report


def _tls(secret: Object, pod: Object) -> dict[str, Any]:
    """Return the options that accept only the certificate of the job's own learner."""
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
