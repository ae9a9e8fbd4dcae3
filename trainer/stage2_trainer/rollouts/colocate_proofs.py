"""Proofs of a colocated engine's weights: its log-probabilities of a prompt against the learner's."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor, nn

from stage2_trainer.weights.errors import ProofError
from stage2_trainer.weights.probe import Probe
from stage2_trainer.weights.verify import default_tolerance, learner_logprobs

logger = logging.getLogger(__name__)


class EngineProver:
    """A prover of the syncs of one engine in this process.

    every: syncs from one proof to the next; 0 = the first alone. tolerance: largest accepted difference of a prompt
    token's log-probability; None = by the model's number format.
    """

    def __init__(self, probe: Probe, *, every: int, tolerance: float | None = None) -> None:
        self._probe = probe
        self._every = every
        self._tolerance = tolerance
        self._syncs = 0

    def after_sync(self, model: nn.Module, logprobs: Callable[[Probe], Tensor]) -> None:
        """Compare, if the turn of this sync has come.

        Raises:
            ProofError: the engine holds other weights than the learner.
        """
        due = self._syncs % self._every == 0 if self._every else self._syncs == 0
        self._syncs += 1
        if not due:
            return
        limit = self._tolerance or default_tolerance(model)
        gap = float((logprobs(self._probe) - learner_logprobs(model, self._probe.inputs).cpu()).abs().max())
        if not gap <= limit:
            raise ProofError(
                f"after the weight sync, log-probabilities of a sample prompt differ from the learner's by up to "
                f"{gap:.3g} in the colocated engine (limit {limit:g}); if this is rounding, raise "
                "custom.extra.rollout_matching.vllm.sync.verify_tolerance"
            )
        logger.info("proved: the engine gives a prompt the learner's log-probabilities to %.2g (limit %g)", gap, limit)
