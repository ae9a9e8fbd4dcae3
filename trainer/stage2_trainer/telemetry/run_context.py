"""The surroundings of a run: what it is told from the outside, and what it reports to."""

from __future__ import annotations

from dataclasses import dataclass, field

from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.sync.fleet.proved_step import ProvedStep
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog, JsonLines


@dataclass(frozen=True)
class RunContext:
    """The surroundings of a run: what it is told from the outside, and what it reports to.

    proved: what proofs of syncs leave for those who keep checkpoints.
    """

    token: str
    reporter: Reporter
    interrupt: Interrupt
    log: EventLog
    rollout_log: JsonLines
    proved: ProvedStep = field(default_factory=ProvedStep)
