"""Rollouts from servers that `swift rollout` started (semantics, section 11): POST /infer/, a list in, a list out.

Such a server pairs answers with requests by their order in a pipe, so it gets one call at a time. A call has one seed:
a greedy chunk is one call, and each sampled request is a call with its own seed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.background import in_background
from stage2_trainer.rollouts.rollout_source import ask_in_parts, contiguous_chunks, readable
from stage2_trainer.telemetry.timeline import TIMELINE
from stage2_trainer.wire.chat import infer, read_answer, request_config
from stage2_trainer.wire.client import ServerClient
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

PHASE = "rollout"

logger = logging.getLogger(__name__)


class SwiftBackend:
    """A Backend over servers of `swift rollout`.

    infer_timeout_s: limit of one call in seconds; None = no limit. These servers do not report which weights they hold,
    so a rollout's version is that of the last sync.
    """

    def __init__(
        self, clients: Sequence[ServerClient], *, sampling: Sampling, infer_timeout_s: float | None = None
    ) -> None:
        self._clients = list(clients)
        self.base_urls = tuple(client.base_url for client in clients)
        TIMELINE.set_servers(self.base_urls)
        self._sampling = sampling
        self._infer_timeout_s = infer_timeout_s

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

        expected: of no effect, since a chunk is a call.

        Raises:
            ServerError: a server did not answer, or answered with something other than rollouts.
        """
        if not requests:
            return []
        chunks = contiguous_chunks(len(requests), len(self._clients))
        shares = [
            in_background(self._chunk, client, requests, range(start, end), seed_plan, version)
            for client, (start, end) in zip(self._clients, chunks, strict=True)
            if start < end
        ]
        outcomes: list[Outcome] = []
        failures = []
        with ACTIVITY.doing("generating", len(requests), "answers") as doing:
            for part in shares:
                try:
                    outcomes += part.result()
                except ServerError as error:
                    failures.append(error)
                doing.done = len(outcomes)
        if failures:
            raise join_errors(failures)
        if on_rollout is not None:
            for index, outcome in enumerate(outcomes):
                on_rollout(index, outcome)
        return outcomes

    def _chunk(
        self,
        client: ServerClient,
        requests: Sequence[RolloutRequest],
        indices: range,
        seed_plan: SeedPlan,
        version: int | None,
    ) -> list[Outcome]:
        calls = [[i] for i in indices] if self._sampling.temperature > 0 else [list(indices)]
        outcomes: dict[int, Outcome] = {}
        for call in calls:
            checked = {i: readable(requests, i) for i in call}
            outcomes |= {i: one for i, one in checked.items() if isinstance(one, Refused)}
            sent = {i: one for i, one in checked.items() if isinstance(one, RolloutRequest)}
            if not sent:
                continue
            config = request_config(self._sampling, seed_plan.seed(call[0]))
            outcomes |= {
                i: one if isinstance(one, Refused) else self._rollout(client, i, one, version)
                for i, one in self._send(client, sent, config).items()
            }
        return [outcomes[i] for i in indices]

    def _send(
        self, client: ServerClient, requests: Mapping[int, RolloutRequest], config: Mapping[str, Any]
    ) -> dict[int, Mapping[str, Any] | Refused]:
        """Return the answers to a call, or the server's refusals."""

        def ask(part: Sequence[RolloutRequest]) -> list[dict[str, Any]]:
            with ExitStack() as under_way:
                for _ in part:
                    under_way.enter_context(TIMELINE.request(client.base_url))
                return infer(client, part, config, phase=PHASE, timeout_s=self._infer_timeout_s)

        def refuses_one(error: Exception) -> bool:
            return isinstance(error, ServerError) and error.status in ONE_REQUEST

        return dict(zip(requests, ask_in_parts(ask, [*requests.values()], refuses=refuses_one), strict=True))

    def _rollout(self, client: ServerClient, index: int, item: Mapping[str, Any], version: int | None) -> Rollout:
        try:
            answer = read_answer(json.dumps(item).encode())
        except ValueError as error:
            raise ServerError(client.base_url, PHASE, f"request {index}: unusable answer: {error}") from error
        return answer.rollout(server=client.base_url, version=UNSYNCED if version is None else version)
