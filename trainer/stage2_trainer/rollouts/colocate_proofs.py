"""Proofs of a colocated engine's weights: its log-probabilities of a prompt against the learner's."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from stage2_trainer.weights.probe import Probe
from stage2_trainer.weights.proved_step import ProvedStep
from stage2_trainer.weights.verify import ProofSchedule

ENGINE = "the colocated engine"


class EngineProver:
    """A prover of the syncs of one engine in this process. every, tolerance, proved: see `ProofSchedule`."""

    def __init__(
        self, probe: Probe, *, every: int, tolerance: float | None = None, proved: ProvedStep | None = None
    ) -> None:
        # Once: the processes of a tensor-parallel engine ask it together, and must do so equally often.
        self._schedule = ProofSchedule(probe, every=every, tolerance=tolerance, attempts=1, proved=proved)

    def after_sync(self, model: nn.Module, logprobs: Callable[[Probe], Tensor], *, step: int) -> None:
        """Compare, if the turn of this step's sync has come.

        Raises:
            ProofError: the engine holds other weights than the learner.
        """
        self._schedule.prove(model, lambda: {ENGINE: lambda: logprobs(self._schedule.probe)}, step=step)
