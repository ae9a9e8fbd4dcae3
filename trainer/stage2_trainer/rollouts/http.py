"""Rollouts from several servers over HTTP: each has a share of the requests; answers come in request order.

A server gets as many requests at once as it can work on, so that it always has the next one. The client notices a
server that hangs even where a request has no time limit. The requests of a lost server go to the others, with the
same seeds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import groupby
from typing import Any, Self, TypeVar

import aiohttp

from stage2_api.errors import shortened
from stage2_trainer.data.images import ImageError
from stage2_trainer.process.activity import ACTIVITY, Doing
from stage2_trainer.rollouts.speeds import Speeds
from stage2_trainer.sync.fleet.retries import REQUESTS
from stage2_trainer.telemetry.timeline import TIMELINE
from stage2_trainer.wire import credentials
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body, read_answer
from stage2_trainer.wire.client import (
    CONNECT_TIMEOUT_S,
    FAILED_CALL,
    MAX_ANSWER_BYTES,
    describe_refusal,
    explain_failure,
    open_session,
    read_content,
    read_object,
)
from stage2_trainer.wire.errors import ServerError, join_errors
from stage2_trainer.wire.requests import (
    ONE_REQUEST,
    UNSYNCED,
    OnRollout,
    Outcome,
    Refused,
    Rollout,
    RolloutRequest,
    Sampling,
    SeedPlan,
)

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)

PHASE = "rollout"
KEEPALIVE_S = 2.0  # below the 5 s after which servers close idle connections, so none closes in mid-request
IN_FLIGHT = 256
CLOSE_S = 10.0
CHECKS_PER_TIMEOUT = 4  # polls of a generating server within `timeout_s`


@dataclass(frozen=True)
class _Work:
    """The arguments of one call of `generate`."""

    requests: Sequence[RolloutRequest]
    expected: Sequence[int]
    seed_plan: SeedPlan
    version: int | None
    on_rollout: OnRollout | None
    doing: Doing
    answered: set[int] = field(default_factory=set)


class ServerBackend:
    """A Backend over one or more servers.

    infer_timeout_s: limit of one request in seconds; None = no limit, but a server that does not report its weight
    version within `timeout_s` while it generates has failed, and the log warns of one that generates for longer.
    timeout_s: limit of any other call in seconds, and of any answer once it has begun. in_flight: most requests under
    way on one server.

    One call at a time, from any thread; connections stay open until `close`, which ends a call that is under way.

    base_urls: the servers that are asked. lost: those of them that failed since they were set.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        token: str,
        sampling: Sampling,
        timeout_s: float,
        infer_timeout_s: float | None = None,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self._sampling = sampling
        self._in_flight = in_flight
        self._idle = threading.Event()
        self._idle.set()
        self._call: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._timeout_s = timeout_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._infer_timeout = aiohttp.ClientTimeout(sock_read=infer_timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._runner = asyncio.Runner()
        self._token = token
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._speeds = Speeds()
        self._logged_step: int | None = None
        self.set_servers(base_urls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def set_servers(self, base_urls: Sequence[str]) -> None:
        """Set the servers that are asked from now on; no call may be under way."""
        self.base_urls = tuple(base_urls)
        self.lost: set[str] = set()
        TIMELINE.set_servers(self.base_urls)

    def close(self) -> None:
        """Close the connections."""
        if (call := self._call) is not None:
            loop, task = call
            loop.call_soon_threadsafe(task.cancel)
        if not self._idle.wait(CLOSE_S):
            return  # the process ends; nobody waits for this
        self._runner.run(self._close())
        self._runner.close()

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        seed_plan: SeedPlan,
        version: int | None = None,
        on_rollout: OnRollout | None = None,
        expected: Sequence[int] = (),
    ) -> list[Outcome]:
        """Return one rollout for each request, or its refusal, in order. No requests: no call.

        expected: as in `ServedBackend`; the requests are divided and ordered by it.

        Raises:
            ServerError: no server is left, or three in a row were lost with the same requests. A server is lost that
                does not answer, answers with something other than a rollout, or holds other weights than `version`.
        """
        if not requests:
            return []
        self._idle.clear()
        try:
            with ACTIVITY.doing("generating", len(requests), "answers") as doing:
                work = _Work(requests, expected, seed_plan, version, on_rollout, doing)
                return self._runner.run(self._generate(work))
        except ExceptionGroup as failures:
            leaves = _leaves(failures)
            raise next((one for one in leaves if not isinstance(one, ServerError)), leaves[0]) from None
        except asyncio.CancelledError:
            raise ServerError(", ".join(self.base_urls), PHASE, "ended: the learner closes its connections") from None
        finally:
            if self.lost:
                # A failed server closes its connections; the next try must not use one of them.
                self._runner.run(self._close())
            self._idle.set()

    def _session(self, url: str) -> aiohttp.ClientSession:
        if url not in self._sessions:
            tls = credentials.trust(url, os.environ) or True
            self._sessions[url] = open_session(url, self._token, limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls)
        return self._sessions[url]

    async def _generate(self, work: _Work) -> list[Outcome]:
        task = asyncio.current_task()
        assert task is not None, "it runs as one"
        self._call = asyncio.get_running_loop(), task
        outcomes: dict[int, Outcome] = {}
        failures: list[ServerError] = []
        room = {url: asyncio.Semaphore(self._in_flight) for url in self.base_urls}

        def divide(indices: Sequence[int], tries: int) -> None:
            fit = [url for url in self.base_urls if url not in self.lost]
            if not fit or tries == REQUESTS:
                raise join_errors(failures)
            shares = self._speeds.divide(indices, fit, work.expected)
            self._log_plan(shares, work.seed_plan)
            for url, share in shares.items():
                if share:
                    group.create_task(give(url, share, tries))

        async def give(url: str, share: Sequence[int], tries: int) -> None:
            found = await self._share(url, share, room[url], work)
            if isinstance(found, ServerError):
                self.lost.add(url)
                failures.append(found)
                divide(share, tries + 1)
            else:
                outcomes.update(found)

        try:
            async with asyncio.TaskGroup() as group:
                if self.lost.issuperset(self.base_urls):  # they may be back
                    self.lost.clear()
                divide(range(len(work.requests)), 0)
        finally:
            self._call = None
        self._speeds.measure([one for one in outcomes.values() if isinstance(one, Rollout)])
        return [outcomes[index] for index in range(len(work.requests))]

    async def _share(
        self, url: str, indices: Sequence[int], room: asyncio.Semaphore, work: _Work
    ) -> Mapping[int, Outcome] | ServerError:
        """Return the outcomes of a server's share, or why the server is lost."""
        error: ServerError | None = None
        try:
            return await self._outcomes(url, indices, room, work)
        except* ServerError as found:
            error = join_errors(_leaves(found))
        return error

    async def _outcomes(
        self, server: str, indices: Sequence[int], room: asyncio.Semaphore, work: _Work
    ) -> Mapping[int, Outcome]:
        """Send a server its share, as many requests at once as it takes; its weights must not change meanwhile."""
        before = await self._version(server)
        if work.version is not None and before != work.version:
            raise self._error(
                server, f"holds weight version {before}, not {work.version}: it was restarted or missed a sync"
            )

        async def request(index: int) -> Outcome:
            async with room:  # before the request is built, whose images take memory
                found = await self._outcome(server, index, work, before)
            work.answered.add(index)  # a server that is lost may have answered some of what others are asked again
            work.doing.done = len(work.answered)
            if work.on_rollout is not None:
                work.on_rollout(index, found)
            return found

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request(i)) for i in indices]
            watch = group.create_task(self._watch(server, tasks))
            await asyncio.wait(tasks)
            watch.cancel()
        after = await self._version(server)
        if after != before:
            raise self._error(server, f"changed from weight version {before} to {after} while it generated")
        return dict(zip(indices, (task.result() for task in tasks), strict=True))

    async def _watch(self, server: str, tasks: Sequence[asyncio.Task[Outcome]]) -> None:
        """Poll a server while it generates; warn when it takes long."""
        start = time.monotonic()
        while True:
            await asyncio.sleep(self._timeout_s / CHECKS_PER_TIMEOUT)
            waiting = sum(not task.done() for task in tasks)
            try:
                await self._version(server)
            except ServerError as error:
                detail = f"{waiting} requests under way, and it does not respond: {error.detail}"
                raise self._error(server, detail) from error
            if (seconds := time.monotonic() - start) > self._timeout_s:
                logger.warning(
                    "server %s: %d of %d requests are still running after %.0f s; vllm.server.infer_timeout_s would "
                    "bound them",
                    server,
                    waiting,
                    len(tasks),
                    seconds,
                )

    async def _outcome(self, server: str, index: int, work: _Work, version: int) -> Outcome:
        try:
            request = work.requests[index]
        except ImageError as error:
            return Refused(error)
        try:
            return await self._request(server, index, request, work.seed_plan.seed(index), version)
        except ServerError as error:
            if error.status not in ONE_REQUEST:
                raise
            return Refused(error)

    async def _request(self, server: str, index: int, request: RolloutRequest, seed: int, version: int) -> Rollout:
        start = time.monotonic()
        body = chat_body(request, self._sampling, seed)
        with TIMELINE.request(server):
            content = await self._call_server(
                server, "POST", CHAT_ROUTE, f"request {index}", json=body, timeout=self._infer_timeout
            )
        try:
            answer = read_answer(content)
        except ValueError as error:
            raise self._error(server, f"request {index}: unusable answer: {error}") from error
        seconds = time.monotonic() - start
        return answer.rollout(server=server, version=version, seed=seed, seconds=seconds)

    async def _version(self, server: str) -> int:
        content = await self._call_server(server, "GET", "/weight_info", "weight version:", timeout=self._timeout)
        try:
            info = read_object(content)
        except ValueError as error:
            raise self._error(server, f"weight version: {error}") from error
        if "weight_version" not in info:
            raise self._error(server, f"weight version: answered {shortened(info)}, without weight_version")
        found = str(info["weight_version"])
        return int(found) if found.isdecimal() else UNSYNCED

    async def _call_server(self, server: str, method: str, path: str, what: str, **options: Any) -> bytes:
        """Return the content of an answer. Raises ServerError for none, and for any status but 200."""
        url = server.rstrip("/") + path
        try:
            async with self._session(server).request(method, url, allow_redirects=False, **options) as response:
                content = await read_content(response, MAX_ANSWER_BYTES, timeout_s=self._timeout_s)
        except FAILED_CALL as error:  # first: a certificate that is refused is a ValueError too
            reason = await asyncio.to_thread(explain_failure, error, server)
            raise self._error(server, f"{what.removesuffix(':')}: {reason}") from error
        except ValueError as error:
            raise self._error(server, f"{what.removesuffix(':')}: {error}") from error
        if response.status != HTTPStatus.OK:
            raise self._error(server, f"{what} {describe_refusal(response.status, content)}", response.status)
        return content

    async def _close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions = {}

    def _error(self, server: str, detail: str, status: int | None = None) -> ServerError:
        return ServerError(server, PHASE, detail, status=status)

    def _log_plan(self, shares: Mapping[str, Sequence[int]], seed_plan: SeedPlan) -> None:
        """Log once for each optimizer step which server is asked which requests, and the base of their seeds."""
        if self._logged_step == seed_plan.global_step:
            return
        self._logged_step = seed_plan.global_step
        plan = "; ".join(f"server {url} requests {_in_words(share)}" for url, share in shares.items() if share)
        count = sum(map(len, shares.values()))
        logger.info(
            "step %d requests %d rollouts, seed base %d: %s", seed_plan.global_step, count, seed_plan.base, plan
        )


def _in_words(numbers: Iterable[int]) -> str:
    """Return numbers in rising order, neighbours together: `0..2 7`."""
    runs = [[one for _, one in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return " ".join(f"{run[0]}..{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def _leaves(group: BaseExceptionGroup[E]) -> list[E]:
    found: list[E] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
