"""Proof of a sync: what the server says of a probe prompt against what the learner's own weights say.

Nothing less will do. A server can take every byte of a push and still answer with old weights (packed copies of the
output layer, cached image embeddings), silently; vLLM's own checksums leave most of a CPU server's weights out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stage2_trainer.weights.errors import ProofError
from stage2_trainer.weights.probe import Probe
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.identity import first_difference
from stage2_trainer.wire.rollout import RolloutRequest, Sampling
from stage2_trainer.wire.swift_infer import infer, request_config

logger = logging.getLogger(__name__)

PHASE = "verify"
Ask = Callable[..., Tensor]
TOLERANCE_PATH = "custom.extra.rollout_matching.vllm.sync.verify_tolerance"
# Seen between vLLM and transformers on the same weights: 2e-6 in float32, 0.06 in bfloat16 (the largest of 50 tokens).
# A step that moves weights by 2 % moves a log-probability by 0.3 or more.
FLOAT32_TOLERANCE = 1e-3
BF16_TOLERANCE = 0.15
SCORED_AT_ONCE = (
    256  # prompt positions whose log-probabilities are computed together: each takes a vocabulary of floats
)


@dataclass(frozen=True)
class ProbeReport:
    """The distance between a server and the learner: the largest difference of a prompt token's log-probability."""

    server: str
    tokens: int
    largest_gap: float


class Prover:
    """A prover of the first sync, and of every `every`-th after it (0: the first alone).

    tolerance: largest accepted difference of a log-probability; None = what rounding explains in the model's dtype.
    ask: how a server is asked; default: by vLLM's chat route.
    """

    def __init__(
        self,
        probe: Probe,
        clients: Sequence[ServerClient],
        *,
        every: int,
        tolerance: float | None = None,
        ask: Ask | None = None,
    ) -> None:
        self._ask = ask or server_logprobs
        self._probe = probe
        self._clients = clients
        self._every = every
        self._tolerance = tolerance
        self._unproved = 0
        self._due = True

    def require_next(self) -> None:
        """Make a proof of the next sync, whenever the last one was."""
        self._due = True

    def after_sync(self, model: nn.Module, *, adapter: str | None = None) -> list[ProbeReport]:
        """Prove the sync that just ended if its turn has come; the reports are empty if not.

        Raises:
            ProofError: a server does not hold these weights.
            ServerError: a server does not answer.
        """
        self._unproved += 1
        if not self._due and not (self._every and self._unproved >= self._every):
            return []
        tolerance = self._tolerance or default_tolerance(model)
        reports = verify(model, self._probe, self._clients, tolerance=tolerance, adapter=adapter, ask=self._ask)
        self._unproved, self._due = 0, False
        for report in reports:
            logger.info(
                "proved: server %s gives %d tokens the learner's log-probabilities to %.2g (limit %g)",
                report.server,
                report.tokens,
                report.largest_gap,
                tolerance,
            )
        return reports


def default_tolerance(model: nn.Module) -> float:
    """Return the difference that rounding explains, by the dtype of the model's embeddings."""
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]  # every transformers model has it
    return FLOAT32_TOLERANCE if embeddings.weight.dtype == torch.float32 else BF16_TOLERANCE


def learner_logprobs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probability of each prompt token but the first, given those before it; shape (prompt - 1,)."""
    device = next(model.parameters()).device
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    with _inference(model):
        logits = model(**moved, use_cache=False).logits[0, :-1]
        targets = moved["input_ids"][0, 1:].unsqueeze(1)
        scored = [
            chosen.float().log_softmax(-1).gather(1, ids).squeeze(1)
            for chosen, ids in zip(logits.split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True)
        ]
    return torch.cat(scored)


def server_logprobs(client: ServerClient, probe: Probe, *, adapter: str | None = None) -> Tensor:
    """Return the same from a server, in float32 on the CPU.

    Raises:
        ServerError: the server reads the prompt as other ids than the learner.
    """
    request = RolloutRequest(messages=probe.messages, adapter=adapter)
    body = chat_body(request, Sampling(max_new_tokens=1), seed=0)
    return _scores(client, probe, client.post(CHAT_ROUTE, PHASE, body={**body, "prompt_logprobs": 0}))


def swift_logprobs(client: ServerClient, probe: Probe, *, adapter: str | None = None) -> Tensor:
    """Return the same from a server of `swift rollout`."""
    config = {**request_config(Sampling(max_new_tokens=1), seed=0), "prompt_logprobs": 0}
    requests = [RolloutRequest(messages=probe.messages, adapter=adapter)]
    (answer,) = infer(client, requests, config, phase=PHASE, timeout_s=client.timeout_s)
    return _scores(client, probe, answer)


def _scores(client: ServerClient, probe: Probe, answer: Mapping[str, Any]) -> Tensor:
    expected: list[int] = probe.inputs["input_ids"][0].tolist()
    if (found := answer["prompt_token_ids"]) != expected:
        raise ServerError(client.base_url, PHASE, f"reads the probe as other ids: {first_difference(expected, found)}")
    scores = zip(answer["prompt_logprobs"][1:], expected[1:], strict=True)
    return torch.tensor([position[str(token_id)]["logprob"] for position, token_id in scores])


def verify(
    model: nn.Module,
    probe: Probe,
    clients: Sequence[ServerClient],
    *,
    tolerance: float,
    adapter: str | None = None,
    ask: Ask | None = None,
) -> list[ProbeReport]:
    """Compare every server with the learner; all are asked at once, while the learner computes its own side.

    Raises:
        ProofError: a server's log-probabilities differ by more than `tolerance`: it does not hold these weights.
        ServerError: a server does not answer, or reads the probe as other ids.
    """
    asked = [in_background(ask or server_logprobs, client, probe, adapter=adapter) for client in clients]
    own = learner_logprobs(model, probe.inputs).cpu()
    gaps = [float((answer.result() - own).abs().max()) for answer in asked]
    wrong = [(client.base_url, gap) for client, gap in zip(clients, gaps, strict=True) if not gap <= tolerance]
    if wrong:
        raise ProofError(
            "after the weight sync, log-probabilities of a sample prompt differ from the learner's by up to "
            + ", ".join(f"{gap:.3g} on server {url}" for url, gap in wrong)
            + f" (limit {tolerance:g}): the server answers with other weights than those that train. Give server and"
            f" learner the same model directory, model.torch_dtype and version of stage2; if the difference is rounding"
            f" (about 0.1 in bfloat16), raise {TOLERANCE_PATH}"
        )
    return [
        ProbeReport(server=client.base_url, tokens=len(own), largest_gap=gap)
        for client, gap in zip(clients, gaps, strict=True)
    ]


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
