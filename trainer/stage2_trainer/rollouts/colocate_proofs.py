"""Proofs of colocated engines' weights: log-probabilities of a prompt against the learner's, in every process."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.process.ranks import gathered, host_group
from stage2_trainer.sync.fleet.errors import ProofError
from stage2_trainer.sync.fleet.probe import Probe
from stage2_trainer.sync.fleet.proved_step import ProvedStep
from stage2_trainer.sync.fleet.verify import ProofSchedule

ENGINE = "the colocated engine"


class EngineProver:
    """A prover of the syncs of one engine in this process, made in all. every, tolerance, proved: see `ProofSchedule`.

    The processes take their turns together, whatever each found in the last one.
    """

    def __init__(
        self, probe: Probe, *, every: int, tolerance: float | None = None, proved: ProvedStep | None = None
    ) -> None:
        self._proved = proved or ProvedStep()
        self._own = ProvedStep()  # of this process's engine; there may be others
        # Once: the processes of a tensor-parallel engine ask it together, and must do so equally often.
        self._schedule = ProofSchedule(probe, every=every, tolerance=tolerance, attempts=1, proved=self._own)
        self._group = host_group()

    def after_sync(self, model: nn.Module, logprobs: Callable[[Probe], Tensor], *, step: int) -> None:
        """Compare, if the turn of this step's sync has come. All processes must call it; a step is proved by all.

        Raises:
            ProofError: an engine holds other weights than the learner; in all processes.
            Interrupted: answers are not wanted any more; in those that noticed it here.
        """
        contradiction, interrupted = "", None
        try:
            self._schedule.prove(model, lambda: {ENGINE: lambda: logprobs(self._schedule.probe)}, step=step)
        except ProofError as error:
            contradiction = str(error)
        except Interrupted as error:
            interrupted = error
        everyone = gathered((contradiction, self._own.step == step), self._group)
        for rank, (found, _) in enumerate(everyone):
            if found:
                raise ProofError(found if len(everyone) == 1 else f"learner process {rank}: {found}")
        if interrupted is not None:
            raise interrupted
        if all(proved for _, proved in everyone):
            self._proved.step = step
        elif any(proved for _, proved in everyone):
            self._schedule.require_next()  # as those do whose engine is in doubt
