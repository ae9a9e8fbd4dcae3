"""Proof of a sync: what the server says of a probe prompt against what the learner's own weights say.

Nothing less will do. A server can take every byte of a push and still answer with old weights (packed copies of the
output layer, cached image embeddings), silently; vLLM's own checksums leave most of a CPU server's weights out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stage2_trainer.rollout.backend import RolloutRequest, Sampling
from stage2_trainer.rollout.wire import CHAT_ROUTE, chat_body
from stage2_trainer.server.client import ServerClient
from stage2_trainer.server.errors import ServerError

PHASE = "verify"
# Seen between vLLM and transformers on the same weights: 2e-6 in float32, 0.06 in bfloat16 (the largest of 50 tokens).
# A step that moves weights by 2 % moves a log-probability by 0.3 or more.
FLOAT32_TOLERANCE = 1e-3
BF16_TOLERANCE = 0.15


@dataclass(frozen=True)
class Probe:
    """One prompt, with an image, in both sides' terms.

    messages: for the server, in OpenAI's chat format.
    inputs: for the learner's model, as its processor made them; input_ids has shape (1, prompt).
    """

    messages: Sequence[Mapping[str, Any]]
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class ProbeReport:
    """How far a server and the learner are apart: the largest difference of a prompt token's log-probability."""

    server: str
    tokens: int
    largest_gap: float


def learner_logprobs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probability of each prompt token but the first, given those before it; shape (prompt - 1,)."""
    with _inference(model):
        logits = model(**inputs, use_cache=False).logits[0, :-1]
    targets = inputs["input_ids"][0, 1:].unsqueeze(1)
    scores: Tensor = logits.float().log_softmax(-1).gather(1, targets).squeeze(1)
    return scores


def server_logprobs(client: ServerClient, probe: Probe) -> Tensor:
    """Return the same from a server, in float32 on the CPU.

    Raises:
        ServerError: the server reads the prompt as other ids than the learner.
    """
    body = chat_body(RolloutRequest(messages=probe.messages), Sampling(max_new_tokens=1), seed=0)
    answer = client.post(CHAT_ROUTE, PHASE, body={**body, "prompt_logprobs": 0})
    expected: list[int] = probe.inputs["input_ids"][0].tolist()
    if (found := answer["prompt_token_ids"]) != expected:
        raise ServerError(client.base_url, PHASE, f"reads the probe as other ids: {_first_difference(expected, found)}")
    scores = zip(answer["prompt_logprobs"][1:], expected[1:], strict=True)
    return torch.tensor([position[str(token_id)]["logprob"] for position, token_id in scores])


def verify(model: nn.Module, probe: Probe, clients: Sequence[ServerClient], *, tolerance: float) -> list[ProbeReport]:
    """Compare every server with the learner.

    Raises:
        ServerError: a server's log-probabilities differ by more than `tolerance`: it does not hold these weights.
    """
    own = learner_logprobs(model, probe.inputs).cpu()
    reports = []
    for client in clients:
        gap = float((server_logprobs(client, probe) - own).abs().max())
        if not gap <= tolerance:
            detail = (
                f"log-probabilities of the probe differ from the learner's by up to {gap:.3g} (limit {tolerance:g})"
            )
            raise ServerError(client.base_url, PHASE, detail)
        reports.append(ProbeReport(server=client.base_url, tokens=len(own), largest_gap=gap))
    return reports


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off, and back to what they were."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> str:
    lengths = f"{len(found)} instead of {len(expected)} tokens"
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return f"{lengths}, first at {position}: {b} instead of {a}"
    return lengths
