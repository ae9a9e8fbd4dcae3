"""Seeds of rollout requests: a deterministic function of run, step, micro-step and request (semantics, section 11)."""

from __future__ import annotations

from dataclasses import dataclass

STEP_STRIDE = (
    1_000_003  # prime; the seeds of two optimizer steps stay apart while a step makes fewer requests than this
)
MICRO_STEP_STRIDE = 8191  # prime; the same for the micro-steps of one accumulation window
SEED_MASK = 0x7FFF_FFFF  # seeds are non-negative 32-bit integers on every backend


def request_seed(training_seed: int, global_step: int, micro_step: int, index: int) -> int:
    """Return the seed of request `index` (0-based, over all servers) of one micro-step.

    It does not depend on how many servers there are or which one answers.
    """
    return (training_seed + global_step * STEP_STRIDE + micro_step * MICRO_STEP_STRIDE + index) & SEED_MASK


@dataclass(frozen=True)
class SeedPlan:
    """The seeds of one micro-step's requests."""

    training_seed: int
    global_step: int
    micro_step: int

    @property
    def base(self) -> int:
        """The seed of the micro-step's first request."""
        return self.seed(0)

    def seed(self, index: int) -> int:
        """Return the seed of request `index`."""
        return request_seed(self.training_seed, self.global_step, self.micro_step, index)
