"""Prompt identity: before the first step, servers and learner must read a prompt as the same ids.

Afterwards each rollout's prompt ids are compared with the learner's own encoding (`data.encode.Encoder.check_prompt`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.wire.background import all_at_once
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.identity import ROUTE, describe, first_difference
from stage2_trainer.wire.rollout import RolloutRequest, Sampling
from stage2_trainer.wire.swift_infer import infer, request_config

logger = logging.getLogger(__name__)

PHASE = "identity"
WAY_OUT = (
    "give server and learner the same model directory and template.min_pixels and max_pixels, and restart the server"
)


def check_identity(
    clients: Sequence[ServerClient], processor: Any, messages: Sequence[Mapping[str, Any]], prompt_ids: Sequence[int]
) -> None:
    """Compare every server's tokenizer, chat template, image limits, and ids of one prompt with the learner's.

    prompt_ids: the learner's ids of `messages`, image placeholders expanded.

    Raises:
        ConfigError: with every difference on every server.
        ServerError: a server does not answer.
    """
    own = describe(processor)
    found = all_at_once(lambda client: _differences(client, own, messages, list(prompt_ids)), clients)
    if problems := list(chain(*found)):
        raise ConfigError(problems)
    logger.info("%d servers read a sample prompt as the learner's %d ids", len(clients), len(prompt_ids))


def _differences(
    client: ServerClient, own: Mapping[str, object], messages: Sequence[Mapping[str, Any]], prompt_ids: list[int]
) -> list[Problem]:
    found = _identity(client)
    problems = [
        Problem(f"server {client.base_url} {name}", found.get(name), f"the learner has {value}", WAY_OUT)
        for name, value in own.items()
        if found.get(name) != value
    ]
    _let_generate(client)
    served = client.post(CHAT_ROUTE, PHASE, body=chat_body(RolloutRequest(messages), Sampling(1), seed=0))
    return problems + _prompt_difference(client, served["prompt_token_ids"], prompt_ids)


def _let_generate(client: ServerClient) -> None:
    """Let a server go on that stands still since a learner died in a push: else it would answer nobody again."""
    if client.get("/is_paused", PHASE).get("is_paused"):
        logger.warning(
            "server %s stands still, as a learner that ended in a push leaves it; it goes on", client.base_url
        )
        client.post("/resume", PHASE)


def check_swift_identity(
    clients: Sequence[ServerClient], messages: Sequence[Mapping[str, Any]], prompt_ids: Sequence[int]
) -> None:
    """Compare the ids of one prompt with those of every server of `swift rollout`, which tells nothing else.

    Raises:
        ConfigError: with every difference on every server.
        ServerError: a server does not answer.
    """

    def differences(client: ServerClient) -> list[Problem]:
        config = request_config(Sampling(max_new_tokens=1), seed=0)
        (answer,) = infer(client, [RolloutRequest(messages)], config, phase=PHASE, timeout_s=client.timeout_s)
        return _prompt_difference(client, answer["prompt_token_ids"], list(prompt_ids))

    if problems := list(chain(*all_at_once(differences, clients))):
        raise ConfigError(problems)


def _prompt_difference(client: ServerClient, theirs: list[int], ours: list[int]) -> list[Problem]:
    if theirs == ours:
        return []
    rule = f"the learner reads the same prompt as other ids, {first_difference(ours, theirs)}"
    return [Problem(f"server {client.base_url} prompt_token_ids", f"{len(theirs)} ids", rule, WAY_OUT)]


def _identity(client: ServerClient) -> dict[str, Any]:
    try:
        return client.get(ROUTE, PHASE)
    except ServerError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        problem = Problem(
            f"server {client.base_url}",
            f"no {ROUTE}",
            "must say how it reads prompts",
            "start it with `stage2 serve`, in the same version as the learner",
        )
        raise ConfigError((problem,)) from error
