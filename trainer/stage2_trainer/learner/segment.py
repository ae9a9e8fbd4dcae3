"""One sample as it is trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stage2_trainer.learner.padding_free_batch import Placed
from stage2_trainer.learner.rollout_metrics import SampleStats
from stage2_trainer.matching import SegmentMeta


@dataclass(frozen=True)
class Segment:
    """One sample as it is trained on: tokens with their positions, where they are supervised, and its figures."""

    placed: Placed
    meta: SegmentMeta
    stats: SampleStats

    def __len__(self) -> int:
        return len(self.placed)

    def aged(self, staleness: int) -> Segment:
        """Return it with the optimizer steps that lie between its rollout and the training on it."""
        return replace(self, stats=replace(self.stats, staleness=staleness))
