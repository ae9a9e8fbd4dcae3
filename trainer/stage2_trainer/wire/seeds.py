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


FURTHER_STRIDE = 64  # more than a prompt has further answers


def further_seed(seed: int) -> int:
    """Return the seed of the first further answer to the prompt of a request with this seed; the others count up.

    Answers of different requests have different ones, and none is beyond `SEED_MASK`.

    >>> further_seed(17), further_seed(18)
    (1152, 1216)
    """
    return (seed + 1) * FURTHER_STRIDE & SEED_MASK


@dataclass(frozen=True)
class SeedPlan:
    """The seeds of requests that are made together: those of one micro-step, or of several in a row.

    micro_step: the first one. sizes: how many of the requests each micro-step has; empty where all are of the first.
    before: how many requests of other processes come before these in each micro-step; empty where there are none.
    """

    training_seed: int
    global_step: int
    micro_step: int
    sizes: tuple[int, ...] = ()
    before: tuple[int, ...] = ()

    @property
    def base(self) -> int:
        """The seed of the first micro-step's first request."""
        return request_seed(self.training_seed + self._others(0), self.global_step, self.micro_step, 0)

    def place(self, index: int) -> tuple[int, int]:
        """Return the micro-step of request `index`, and the request's place in it.

        >>> [SeedPlan(17, 0, 4, sizes=(2, 0, 1)).place(i) for i in range(3)]
        [(4, 0), (4, 1), (6, 0)]
        """
        start = 0
        for offset, size in enumerate(self.sizes):
            if index < start + size:
                return self.micro_step + offset, index - start
            start += size
        return self.micro_step + max(len(self.sizes) - 1, 0), index - start + (self.sizes[-1] if self.sizes else 0)

    def seed(self, index: int) -> int:
        """Return the seed of request `index`: the same, whatever it is asked together with."""
        micro_step, place = self.place(index)
        others = self._others(micro_step - self.micro_step)
        return request_seed(self.training_seed + others, self.global_step, micro_step, place)

    def _others(self, offset: int) -> int:
        return self.before[offset] if self.before else 0
