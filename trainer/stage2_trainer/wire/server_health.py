"""Waiting until every rollout server answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

from stage2_api.pod.ports import HEALTH_ROUTE
from stage2_trainer.wire.background import all_at_once
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError, join_errors

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
HEALTH_TIMEOUT_S = 5.0
TOLD_EVERY_S = 30.0
Protocol = Literal["vllm", "swift"]
HEALTH_ROUTES: dict[Protocol, str] = {"vllm": HEALTH_ROUTE, "swift": f"{HEALTH_ROUTE}/"}


def wait_until_healthy(base_urls: Sequence[str], token: str, *, timeout_s: float, protocol: Protocol = "vllm") -> None:
    """Return once every server answers its health route, and takes the token.

    Raises:
        ServerError: a server did not answer within `timeout_s` seconds (counted once for all), or refuses the token.
    """
    logger.info("waiting for servers, at most %g s: %s", timeout_s, ", ".join(base_urls))
    with ExitStack() as stack:
        clients = [ServerClient(url, token, timeout_s=HEALTH_TIMEOUT_S) for url in base_urls]
        for client in clients:
            stack.callback(client.close)
        _wait(clients, timeout_s, HEALTH_ROUTES[protocol])
        all_at_once(_tell_of_workers if protocol == "swift" else _tell_of_version, clients)


def wait_for_ever(base_urls: Sequence[str], token: str, *, protocol: Protocol = "vllm") -> None:
    """Return once every server answers its health route; until then, log now and then who does not, and how."""
    logger.info("waiting for servers: %s", ", ".join(base_urls))
    with ExitStack() as stack:
        clients = [ServerClient(url, token, timeout_s=HEALTH_TIMEOUT_S) for url in base_urls]
        for client in clients:
            stack.callback(client.close)
        told = time.monotonic()
        while failures := [failure for _, failure in _failing(clients, HEALTH_ROUTES[protocol])]:
            if time.monotonic() - told >= TOLD_EVERY_S:
                told = time.monotonic()
                logger.info(
                    "%d of %d servers do not answer yet: %s", len(failures), len(clients), join_errors(failures)
                )
            time.sleep(POLL_INTERVAL_S)
    logger.info("all %d servers answer", len(base_urls))


def _wait(clients: Sequence[ServerClient], timeout_s: float, route: str) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = list(clients)
    while failures := _failing(waiting, route):
        if time.monotonic() > deadline:
            raise join_errors(
                [
                    ServerError(client.base_url, "health", f"not healthy within {timeout_s:g} s: {failure.detail}")
                    for client, failure in failures
                ]
            )
        waiting = [client for client, _ in failures]
        time.sleep(POLL_INTERVAL_S)


def _failing(clients: Sequence[ServerClient], route: str) -> list[tuple[ServerClient, ServerError]]:
    """Ask all at once: one that stands still takes the whole time limit of a call."""

    def failure(client: ServerClient) -> ServerError | None:
        try:
            client.get(route, "health")
        except ServerError as error:
            return error
        return None

    found = zip(clients, all_at_once(failure, clients), strict=True)
    return [(client, error) for client, error in found if error is not None]


def _tell_of_workers(client: ServerClient) -> None:
    workers = client.get("/get_world_size/", "health")["world_size"]
    logger.info("server %s is healthy, %d workers", client.base_url, workers)


def _tell_of_version(client: ServerClient) -> None:
    logger.info("server %s is healthy, weight version %s", client.base_url, client.weight_version())
