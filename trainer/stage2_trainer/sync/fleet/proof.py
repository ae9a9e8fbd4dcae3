"""The proof of a push: servers and learner must give a probe's tokens the same log-probabilities.

Nothing less will do. A server can take every byte and still answer with old weights (packed copies of the output layer,
cached image embeddings), silently; vLLM's own checksums leave out most of a CPU server's weights.

Two implementations of one model round differently, so their log-probabilities are never equal. A healthy pair differs a
little everywhere and a lot on a few unlikely tokens; a server with other weights differs a lot everywhere. So the mean
and the 99th percentile over the text tokens are judged, never the largest (source of the limits: bench/probe_gap).
Image placeholders are left out: no one reads their log-probabilities, and there are many times more of them. Where the
weights have moved far enough, the learner's log-probabilities before they moved decide: a server that is nearer to
those has kept its old weights, whatever the distance.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._nn import linear
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from stage2_trainer.data.encode import Encoder
from stage2_trainer.process.background import in_background
from stage2_trainer.sync.fleet.report import DoubtfulProof, ProofError, ProvedStep
from stage2_trainer.sync.fleet.retries import PROOFS
from stage2_trainer.sync.tensors.merge import HERE, WeightAccess
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body, infer, request_config
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.identity import first_difference
from stage2_trainer.wire.requests import RolloutRequest, Sampling

logger = logging.getLogger(__name__)

PHASE = "verify"
TOLERANCE_PATH = "custom.extra.rollout_matching.vllm.sync.verify_tolerance"
FLOAT32_TOLERANCE = 1e-4
BF16_TOLERANCE = 0.06
"""Largest mean differences that rounding explains (bench/results/probe_gap.md)."""
ROUNDINGS = 2
"""The tolerance over the distance that rounding makes between two evaluations of the learner: a server's distance was
0.8 to 1.3 of it, for 4 to 36 layers."""
WIDENED_AT_ONCE = 2**26  # elements of a weight
TAIL = 0.99
TAIL_TO_MEAN = 8
"""The limit of the 99th percentile over that of the mean; see bench/probe_gap."""
CONTRADICTION = 2.5
"""Only other weights explain a distance of so many limits."""
TOLD_APART = 2
"""Weights that moved the log-probabilities by so many limits can be told apart from those before."""
SCORED_AT_ONCE = 256  # prompt positions that are scored together: each takes a vocabulary of floats
CONTRADICTED = (
    "the server answers with other weights than those that train. Give server and learner the same model directory,"
    f" model.torch_dtype and version of stage2; if the difference is rounding, raise {TOLERANCE_PATH}"
)
DOUBTED = (
    "more than rounding usually explains, and less than other weights would. Where it stays so and answers are good,"
    f" raise {TOLERANCE_PATH}"
)

Ask = Callable[..., Tensor]
Answers = Mapping[str, Callable[[], Tensor]]
"""Calls that wait for the answer of each server, by the server's name."""


@dataclass(frozen=True)
class Probe:
    """One prompt, with an image and perhaps an answer, as both sides read it.

    messages: for the server, in OpenAI's chat format.
    inputs: for the learner's model, from its processor; input_ids has shape (1, prompt).
    """

    messages: Sequence[Mapping[str, Any]]
    inputs: Mapping[str, Tensor]


def sample_probe(encoder: Encoder, chat: list[dict[str, Any]], answer: str = "") -> Probe:
    """Return the probe of a chat.

    answer: follows as the assistant's turn, so that tokens as the model generates them are compared too.
    """
    chat = [*chat, {"role": "assistant", "content": answer}] if answer else chat
    prompt = encoder.prompt(chat)
    inputs = {
        "input_ids": prompt.input_ids.unsqueeze(0),
        "mm_token_type_ids": prompt.mm_token_type_ids.unsqueeze(0),
        "pixel_values": prompt.pixel_values,
        "image_grid_thw": prompt.image_grid_thw,
    }
    return Probe(messages=chat, inputs={name: tensor for name, tensor in inputs.items() if tensor is not None})


class Prover:
    """Decides which pushes are proved, and what follows: a contradiction ends the run, a doubt is retried.

    The first push is proved, and every `every`-th after it (0: the first alone). clients: the servers of `prove_push`.
    ask: returns a server's log-probabilities; default: by vLLM's chat route. tolerance: see `judge`; None = by the
    model's number format and rounding. proved: holds the newest step that is proved. access: how weights are read.
    gap: the largest mean difference of the last proof; None before the first one.
    """

    def __init__(
        self,
        probe: Probe,
        clients: Sequence[ServerClient] = (),
        *,
        ask: Ask | None = None,
        every: int,
        tolerance: float | None = None,
        proved: ProvedStep | None = None,
        access: WeightAccess = HERE,
    ) -> None:
        self.probe = probe
        self.clients = clients
        self._ask = ask or server_logprobs
        self._access = access
        self._proved = proved or ProvedStep()
        self._every = every
        self._tolerance = tolerance
        self._unproved = 0
        self._due = True
        self._text = text_tokens(probe.inputs["mm_token_type_ids"])
        self._previous: Tensor | None = None
        self.gap: float | None = None

    def require_next(self) -> None:
        """Prove the next push, whenever the last proof was."""
        self._due = True

    def prove_push(self, model: nn.Module, *, step: int, adapter: str | None = None) -> None:
        """Prove a push to all servers at once, as `prove` does. adapter: the one that must answer; None = none."""
        self.prove(model, lambda: self._ask_all(adapter), step=step)

    def _ask_all(self, adapter: str | None) -> Answers:
        return {
            f"server {client.base_url}": in_background(self._ask, client, self.probe, adapter=adapter).result
            for client in self.clients
        }

    def prove(self, model: nn.Module, ask: Callable[[], Answers], *, step: int, attempts: int = PROOFS) -> Gaps:
        """Prove the push that just ended if it is due; there are no gaps if it is not, and where a doubt is left.

        step: the optimizer step of its weights. ask: starts to ask every server. attempts: before a doubt stays.

        Raises:
            ProofError: a server does not hold these weights.
            ServerError: a server does not answer.
        """
        self._unproved += 1
        if not self._due and not (self._every and self._unproved >= self._every):
            return {}
        self._due = True
        gaps = self._try(model, ask, attempts)
        self._due = not gaps
        if gaps:
            self._unproved = 0
            self._proved.step = step
        return gaps

    def _try(self, model: nn.Module, ask: Callable[[], Answers], attempts: int) -> Gaps:
        for attempt in range(1, attempts + 1):
            waiting = ask()
            own = self._computed(learner_logprobs, model)
            self._tolerance = self._tolerance or self._calibrated(model, own)
            answers = {server: answer()[self._text] for server, answer in waiting.items()}
            try:
                gaps = judge(answers, own, self._previous, tolerance=self._tolerance)
            except DoubtfulProof as doubt:
                logger.warning("the push is not yet proved, attempt %d of %d: %s", attempt, attempts, doubt)
                continue
            self._previous = own
            self.gap = max(gap.mean for gap in gaps.values())
            for server, gap in gaps.items():
                logger.info("proved: %s has the learner's log-probabilities, with a gap of %s", server, gap)
            return gaps
        return {}

    def _calibrated(self, model: nn.Module, own: Tensor) -> float:
        """Return the tolerance of a model, from what rounding does to its own log-probabilities."""
        tolerance = default_tolerance(model)
        if tolerance == FLOAT32_TOLERANCE:
            return tolerance
        rounding = Gap.between(own, self._computed(wide_logprobs, model))
        if math.isfinite(rounding.mean):
            tolerance = max(tolerance, ROUNDINGS * rounding.mean)
        text = "rounding changes the learner's own log-probabilities by %s; proofs accept gaps up to %.2g"
        logger.info(text, rounding, tolerance)
        return tolerance

    def _computed(self, logprobs: Callable[..., Tensor], model: nn.Module) -> Tensor:
        return self._access.compute(logprobs, model, self.probe.inputs).cpu()[self._text]


@dataclass(frozen=True)
class Gap:
    """The distance between log-probabilities of the same tokens: mean and 99th percentile of absolute differences."""

    mean: float
    tail: float
    tokens: int

    @classmethod
    def between(cls, one: Tensor, other: Tensor) -> Gap:
        """Return the distance of two vectors of log-probabilities, shape (tokens,)."""
        differences = (one.double() - other.double()).abs()
        if not bool(differences.isfinite().all()):
            return cls(math.inf, math.inf, len(differences))
        return cls(float(differences.mean()), float(differences.quantile(TAIL)), len(differences))

    def exceeds(self, tolerance: float, *, times: float = 1) -> bool:
        """Whether mean or 99th percentile is above so many times its limit."""
        return self.mean > times * tolerance or self.tail > times * tolerance * TAIL_TO_MEAN

    def __str__(self) -> str:
        return f"{self.mean:.2g} in the mean and {self.tail:.2g} at the 99th percentile of {self.tokens} tokens"


Gaps = Mapping[str, Gap]
"""The distance between each server and the learner over a probe's text tokens, by the server's name."""


def judge(answers: Mapping[str, Tensor], own: Tensor, previous: Tensor | None, *, tolerance: float) -> Gaps:
    """Compare each server's log-probabilities of a probe's text tokens with the learner's, now and before.

    answers: by server, each of shape (tokens,). own, previous: the learner's now, and at the last proof.
    tolerance: largest mean difference that rounding explains; the 99th percentile may be `TAIL_TO_MEAN` times that.

    Raises:
        ProofError: a server holds other weights.
        DoubtfulProof: a server is farther away than rounding explains, and not so far that only other weights do.
    """
    gaps = {server: Gap.between(answer, own) for server, answer in answers.items()}
    wrong = [
        f"{gap} on {server}{stale}"
        for server, gap in gaps.items()
        if (stale := _stale(answers[server], own, previous, tolerance)) or gap.exceeds(tolerance, times=CONTRADICTION)
    ]
    if wrong:
        raise ProofError(f"{_differ(wrong, tolerance)}: {CONTRADICTED}")
    doubtful = [f"{gap} on {server}" for server, gap in gaps.items() if gap.exceeds(tolerance)]
    if doubtful:
        raise DoubtfulProof(f"{_differ(doubtful, tolerance)}: {DOUBTED}")
    return gaps


def _stale(answer: Tensor, own: Tensor, previous: Tensor | None, tolerance: float) -> str:
    """Return the evidence that a server has kept the weights of the last proof; "" if it has not."""
    if previous is None or Gap.between(own, previous).mean <= TOLD_APART * tolerance:
        return ""
    kept = Gap.between(answer, previous)
    return f" ({kept.mean:.2g} from those before it)" if kept.mean < Gap.between(answer, own).mean else ""


def _differ(gaps: list[str], tolerance: float) -> str:
    return (
        "after the weight sync, log-probabilities of a sample prompt differ from the learner's by"
        f" {', '.join(gaps)} (limits {tolerance:g} and {tolerance * TAIL_TO_MEAN:g})"
    )


def text_tokens(token_types: Tensor) -> Tensor:
    """Return which of a prompt's tokens but the first are text; token_types has shape (1, prompt), text is 0."""
    return token_types[0, 1:].cpu() == 0


def default_tolerance(model: nn.Module) -> float:
    """Return the difference that rounding explains, by the dtype of the model's embeddings."""
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]  # every transformers model has it
    return FLOAT32_TOLERANCE if embeddings.weight.dtype == torch.float32 else BF16_TOLERANCE


def learner_logprobs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probability of each prompt token but the first, given those before it; shape (prompt - 1,)."""
    device = next(model.parameters()).device
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    with inference(model):
        logits = model(**moved, use_cache=False).logits[0, :-1]
        targets = moved["input_ids"][0, 1:].unsqueeze(1)
        scored = [
            chosen.float().log_softmax(-1).gather(1, ids).squeeze(1)
            for chosen, ids in zip(logits.split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True)
        ]
    return torch.cat(scored)


def wide_logprobs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probabilities of the same weights, computed in float32 throughout; weights are cast in parts."""
    with _torchs_linear(), Widened():
        return learner_logprobs(model, inputs)


@contextmanager
def _torchs_linear() -> Iterator[None]:
    """Put torch's own function back for a block: ZeRO-3 leaves one in `F.linear` that `Widened` does not see."""
    found, F.linear = F.linear, linear
    try:
        yield
    finally:
        F.linear = found


class Widened(TorchFunctionMode):
    """Makes layers with 16-bit weights compute in float32, and return it."""

    _LAYERS = frozenset({linear, F.layer_norm, F.conv3d, F.embedding})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._LAYERS:
            return func(*args, **(kwargs or {}))
        if func is linear and args[1].numel() > WIDENED_AT_ONCE:
            return self._linear(*args, **(kwargs or {}))
        if func is not F.embedding:  # whose table is large, and its rows are not changed
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs or {}))
        return _widened(func(*args, **(kwargs or {})))

    def _linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = weight.split(max(1, WIDENED_AT_ONCE // weight.shape[1]))
        found = torch.cat([linear(inputs.float(), part.float()) for part in parts], dim=-1)
        return found if bias is None else found + bias.float()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


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


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off for a block, and restore them, also when it raises."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
