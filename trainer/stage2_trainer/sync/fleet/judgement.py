"""The judgement of a probe: does a server answer with the learner's weights, with others, or is it in doubt?

Two implementations of one model round differently, so their log-probabilities of the same tokens are never equal. A
healthy pair differs a little everywhere and a lot on a few unlikely tokens; a server with other weights differs much
everywhere. So the mean and the 99th percentile over the text tokens are judged, and never the largest (source of the
limits: bench/probe_gap). Image placeholders are left out: no one ever reads their log-probabilities, and there are
many times more of them.

Where the weights have moved far enough, the learner's log-probabilities before they moved tell more than any limit: a
server that is nearer to those has kept its old weights, whatever the distance is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from stage2_trainer.sync.fleet.errors import DoubtfulProof, ProofError

TOLERANCE_PATH = "custom.extra.rollout_matching.vllm.sync.verify_tolerance"
TAIL = 0.99
TAIL_TO_MEAN = 8
"""The limit of the 99th percentile over that of the mean; see bench/probe_gap."""
CONTRADICTION = 2.5
"""A distance so many times over its limit is explained by other weights alone."""
TOLD_APART = 2
"""Weights that moved the log-probabilities by so many limits are told apart from those before."""


CONTRADICTED = (
    "the server answers with other weights than those that train. Give server and learner the same model directory,"
    f" model.torch_dtype and version of stage2; if the difference is rounding, raise {TOLERANCE_PATH}"
)
DOUBTED = (
    "more than rounding usually explains, and less than other weights would. Where it stays so and answers are good,"
    f" raise {TOLERANCE_PATH}"
)


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


@dataclass(frozen=True)
class ProbeReport:
    """The distance between a server and the learner, over a probe's text tokens."""

    server: str
    gap: Gap


def judge(
    answers: Mapping[str, Tensor], own: Tensor, previous: Tensor | None, *, tolerance: float
) -> list[ProbeReport]:
    """Compare what each server says of a probe's text tokens with what the learner says, and said before.

    answers: log-probabilities by server, each of shape (tokens,). previous: the learner's own at the last proof.
    tolerance: largest mean difference that rounding explains; the 99th percentile may be `TAIL_TO_MEAN` times that.

    Raises:
        ProofError: a server holds other weights.
        DoubtfulProof: a server is farther away than rounding explains, and not so far that only other weights do.
    """
    gaps = {server: Gap.between(found, own) for server, found in answers.items()}
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
    return [ProbeReport(server, gap) for server, gap in gaps.items()]


def text_tokens(token_types: Tensor) -> Tensor:
    """Return which of a prompt's tokens but the first are text; token_types has shape (1, prompt), text is 0."""
    return token_types[0, 1:].cpu() == 0


def _stale(found: Tensor, own: Tensor, previous: Tensor | None, tolerance: float) -> str:
    """Return what tells that a server has kept the weights of the last proof; nothing if it has not."""
    if previous is None or Gap.between(own, previous).mean <= TOLD_APART * tolerance:
        return ""
    kept = Gap.between(found, previous)
    return f" ({kept.mean:.2g} from those before it)" if kept.mean < Gap.between(found, own).mean else ""


def _differ(gaps: list[str], tolerance: float) -> str:
    return (
        "after the weight sync, log-probabilities of a sample prompt differ from the learner's by"
        f" {', '.join(gaps)} (limits {tolerance:g} and {tolerance * TAIL_TO_MEAN:g})"
    )
