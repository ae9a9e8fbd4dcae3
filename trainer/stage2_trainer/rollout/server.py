"""Rollouts from several servers over HTTP: contiguous chunks, one request each, answers in request order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Self

import httpx

from stage2_trainer.rollout.backend import Rollout, RolloutRequest, Sampling
from stage2_trainer.rollout.chunks import contiguous_chunks
from stage2_trainer.rollout.seeds import SeedPlan
from stage2_trainer.rollout.wire import CHAT_ROUTE, chat_body, read_answer
from stage2_trainer.server.client import CONNECT_TIMEOUT_S, MAX_ERROR_CHARS, describe_http_error, http_options
from stage2_trainer.server.errors import ServerError, join_errors

logger = logging.getLogger(__name__)

PHASE = "rollout"
# Servers close idle connections after 5 s; one that we close earlier is never found closed in mid-request.
LIMITS = httpx.Limits(max_connections=256, keepalive_expiry=2.0)
UNSYNCED = -1  # the version of a server that was never given weights


class ServerBackend:
    """A Backend over one or more servers.

    infer_timeout_s: seconds that one request may take; None = no limit.
    timeout_s: seconds that any other call may take.

    Use it from one thread at a time; connections stay open between calls until `close`.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        token: str,
        sampling: Sampling,
        timeout_s: float,
        infer_timeout_s: float | None = None,
    ) -> None:
        self._sampling = sampling
        self._timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        self._infer_timeout = httpx.Timeout(infer_timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        self._runner = asyncio.Runner()
        self._base_urls = list(base_urls)
        self._token = token
        self._servers = self._connect()
        self._logged_step: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._close())
        self._runner.close()

    def generate(
        self, requests: Sequence[RolloutRequest], *, seed_plan: SeedPlan, version: int | None = None
    ) -> list[Rollout]:
        """Return one rollout for each request, in order. No requests: no call.

        Raises:
            ServerError: a server did not answer, answered something else than a rollout, or holds other weights than
                `version`. Requests under way on the other servers are cancelled.
        """
        if not requests:
            return []
        chunks = contiguous_chunks(len(requests), len(self._servers))
        self._log_plan(chunks, seed_plan)
        try:
            return self._runner.run(self._generate(requests, chunks, seed_plan, version))
        except ServerError:
            # A failed server closes its connections; the next try shall not meet one of them.
            self._runner.run(self._close())
            self._servers = self._connect()
            raise

    def _connect(self) -> list[httpx.AsyncClient]:
        return [httpx.AsyncClient(**http_options(url, self._token), limits=LIMITS) for url in self._base_urls]

    async def _generate(
        self,
        requests: Sequence[RolloutRequest],
        chunks: Sequence[tuple[int, int]],
        seed_plan: SeedPlan,
        version: int | None,
    ) -> list[Rollout]:
        try:
            async with asyncio.TaskGroup() as group:
                parts = [
                    group.create_task(self._chunk(server, requests, range(start, end), seed_plan, version))
                    for server, (start, end) in enumerate(chunks)
                    if start < end
                ]
        except* ServerError as failures:
            raise join_errors(_leaves(failures)) from None
        return [rollout for part in parts for rollout in part.result()]

    async def _chunk(
        self,
        server: int,
        requests: Sequence[RolloutRequest],
        indices: range,
        seed_plan: SeedPlan,
        version: int | None,
    ) -> list[Rollout]:
        """Ask one server for its share, all requests at once; its weights must stay the same meanwhile."""
        before = await self._version(server)
        if version is not None and before != version:
            raise self._error(
                server, f"holds weight version {before}, not {version}: it was restarted or missed a sync"
            )
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._request(server, i, requests[i], seed_plan.seed(i), before)) for i in indices
            ]
        after = await self._version(server)
        if after != before:
            raise self._error(server, f"changed from weight version {before} to {after} while it generated")
        return [task.result() for task in tasks]

    async def _request(self, server: int, index: int, request: RolloutRequest, seed: int, version: int) -> Rollout:
        body = chat_body(request, self._sampling, seed)
        try:
            response = await self._servers[server].post(CHAT_ROUTE, json=body, timeout=self._infer_timeout)
        except httpx.HTTPError as error:
            raise self._error(server, f"request {index}: {describe_http_error(error)}") from error
        if response.status_code != httpx.codes.OK:
            detail = f"request {index} answered {response.status_code}: {response.text[:MAX_ERROR_CHARS]}"
            raise self._error(server, detail)
        try:
            answer = read_answer(response.content)
        except ValueError as error:
            raise self._error(server, f"request {index}: unusable answer: {error}") from error
        (choice,) = answer.choices
        return Rollout(
            prompt_token_ids=answer.prompt_token_ids,
            token_ids=choice.token_ids,
            text=choice.message.content,
            server=self._base_urls[server],
            version=version,
            finish_reason=choice.finish_reason,
        )

    async def _version(self, server: int) -> int:
        try:
            response = await self._servers[server].get("/weight_info", timeout=self._timeout)
        except httpx.HTTPError as error:
            raise self._error(server, f"weight version: {describe_http_error(error)}") from error
        if response.status_code != httpx.codes.OK:
            detail = f"weight version: answered {response.status_code}: {response.text[:MAX_ERROR_CHARS]}"
            raise self._error(server, detail)
        found = str(response.json()["weight_version"])
        return int(found) if found.isdecimal() else UNSYNCED

    async def _close(self) -> None:
        for server in self._servers:
            await server.aclose()

    def _error(self, server: int, detail: str) -> ServerError:
        return ServerError(self._base_urls[server], PHASE, detail)

    def _log_plan(self, chunks: Sequence[tuple[int, int]], seed_plan: SeedPlan) -> None:
        """Say once for each optimizer step who answers what with which seeds."""
        if self._logged_step == seed_plan.global_step:
            return
        self._logged_step = seed_plan.global_step
        plan = "; ".join(
            f"server {i} {self._base_urls[i]} requests {start}..{end - 1} seeds from {seed_plan.seed(start)}"
            for i, (start, end) in enumerate(chunks)
            if start < end
        )
        logger.info(
            "step %d: %d rollouts, seed base %d: %s", seed_plan.global_step, chunks[-1][1], seed_plan.base, plan
        )


def _leaves(group: BaseExceptionGroup[ServerError]) -> list[ServerError]:
    found: list[ServerError] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
