"""Proof of a sync: what the server says of a probe prompt against what the learner's own weights say.

Nothing less will do. A server can take every byte of a push and still answer with old weights (packed copies of the
output layer, cached image embeddings), silently; vLLM's own checksums leave most of a CPU server's weights out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stage2_trainer.sync.fleet.errors import DoubtfulProof
from stage2_trainer.sync.fleet.judgement import ProbeReport, judge, text_tokens
from stage2_trainer.sync.fleet.probe import Probe
from stage2_trainer.sync.fleet.proved_step import ProvedStep
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body, infer, request_config
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.identity import first_difference
from stage2_trainer.wire.requests import RolloutRequest, Sampling

logger = logging.getLogger(__name__)

PHASE = "verify"
Ask = Callable[..., Tensor]
FLOAT32_TOLERANCE = 1e-4
BF16_TOLERANCE = 0.06
"""Largest mean differences that rounding explains (bench/results/probe_gap.md)."""
SCORED_AT_ONCE = (
    256  # prompt positions whose log-probabilities are computed together: each takes a vocabulary of floats
)


class ProofSchedule:
    """The turns of proofs, and their consequences: a contradiction ends the run, a doubt is tried again.

    The first sync is proved, and every `every`-th after it (0: the first alone). tolerance: see `judge`; None = by the
    model's number format. attempts: how often one sync is put to the proof before a doubt is left standing. proved:
    learns of each step that is proved.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        every: int,
        tolerance: float | None = None,
        attempts: int = 2,
        proved: ProvedStep | None = None,
    ) -> None:
        self.probe = probe
        self._proved = proved or ProvedStep()
        self._every = every
        self._tolerance = tolerance
        self._attempts = attempts
        self._unproved = 0
        self._due = True
        self._text = text_tokens(probe.inputs["mm_token_type_ids"])
        self._previous: Tensor | None = None

    def require_next(self) -> None:
        """Make a proof of the next sync, whenever the last one was."""
        self._due = True

    def prove(
        self, model: nn.Module, ask: Callable[[], Mapping[str, Callable[[], Tensor]]], *, step: int
    ) -> list[ProbeReport]:
        """Prove the sync that just ended if its turn has come; the reports are empty if not, and where doubt is left.

        step: the optimizer step of its weights. ask: starts to ask every server; what it returns waits for the answer
        of each, by the server's name.

        Raises:
            ProofError: a server does not hold these weights.
            ServerError: a server does not answer.
        """
        self._unproved += 1
        if not self._due and not (self._every and self._unproved >= self._every):
            return []
        self._due = True
        reports = self._tried(model, ask)
        self._due = not reports
        if reports:
            self._unproved = 0
            self._proved.step = step
        return reports

    def _tried(self, model: nn.Module, ask: Callable[[], Mapping[str, Callable[[], Tensor]]]) -> list[ProbeReport]:
        tolerance = self._tolerance or default_tolerance(model)
        for attempt in range(1, self._attempts + 1):
            asked = ask()
            own = learner_logprobs(model, self.probe.inputs).cpu()[self._text]
            found = {server: answer()[self._text] for server, answer in asked.items()}
            try:
                reports = judge(found, own, self._previous, tolerance=tolerance)
            except DoubtfulProof as doubt:
                logger.warning("in doubt, attempt %d of %d: %s", attempt, self._attempts, doubt)
                continue
            self._previous = own
            for report in reports:
                logger.info("proved: %s answers as the learner does, to %s", report.server, report.gap)
            return reports
        return []


class Prover:
    """A prover of syncs to servers. every, tolerance, proved: see `ProofSchedule`.

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
        proved: ProvedStep | None = None,
    ) -> None:
        self._ask = ask or server_logprobs
        self._clients = clients
        self._schedule = ProofSchedule(probe, every=every, tolerance=tolerance, proved=proved)

    def require_next(self) -> None:
        """Make a proof of the next sync, whenever the last one was."""
        self._schedule.require_next()

    def after_sync(self, model: nn.Module, *, step: int, adapter: str | None = None) -> list[ProbeReport]:
        """Prove the sync of a step that just ended if its turn has come; all servers are asked at once.

        Raises:
            ProofError: a server does not hold these weights.
            ServerError: a server does not answer.
        """
        return self._schedule.prove(model, lambda: self._asked(adapter), step=step)

    def _asked(self, adapter: str | None) -> dict[str, Callable[[], Tensor]]:
        return {
            f"server {client.base_url}": in_background(self._ask, client, self._schedule.probe, adapter=adapter).result
            for client in self._clients
        }


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
    """Compare every server with the learner, once, and let nothing pass that is in doubt.

    Raises:
        ProofError: a server does not hold these weights, or that is in doubt.
        ServerError: a server does not answer, or reads the probe as other ids.
    """
    text = text_tokens(probe.inputs["mm_token_type_ids"])
    own = learner_logprobs(model, probe.inputs).cpu()[text]
    asking = ask or server_logprobs
    found = {f"server {client.base_url}": asking(client, probe, adapter=adapter)[text] for client in clients}
    return judge(found, own, None, tolerance=tolerance)


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
