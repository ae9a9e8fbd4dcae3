"""Mean and spread of the rewards of an evaluation, over its samples.

TRL takes the mean of the batches' means. Then a sample counts more in the last, small batch than elsewhere, and twice
if two processes had it to fill their batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from stage2_trainer.process.ranks import gathered
from stage2_trainer.telemetry.answer_tables import HeldOutAnswer

REWARD = "reward"
"""The weighted sum among the figures of an answer; the others are the rewards by their names."""


def held_out_rewards(own: Sequence[HeldOutAnswer]) -> dict[str, float]:
    """Return the figures of all processes' answers by TRL's keys; NaN for the spread of one answer.

    own: this process's answers. All processes call it.
    """
    everywhere = gathered({answer.record.index: answer.figures for answer in own})
    rewards = list({index: figures for part in everywhere for index, figures in part.items()}.values())
    found: dict[str, float] = {}
    for name in rewards[0] if rewards else ():
        mean, spread = (REWARD, f"{REWARD}_std") if name == REWARD else (f"rewards/{name}/mean", f"rewards/{name}/std")
        values = [figures[name] for figures in rewards]
        found |= {mean: fmean(values), spread: stdev(values) if len(values) > 1 else math.nan}
    return found
