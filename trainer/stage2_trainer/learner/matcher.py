"""A record and its rollout, matched: what both training and evaluation begin with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stage2_trainer.data.records import Record
from stage2_trainer.matching import CoordVocab, MatchedTarget, MatchOptions, build_target, cut_before, object_ends
from stage2_trainer.rollouts.bad_samples import BadSample
from stage2_trainer.rollouts.rollout_source import RolloutBatch
from stage2_trainer.wire.requests import Rollout, SeedPlan


@dataclass(frozen=True)
class Matched:
    """One record, the rollout that answered it, and what matching made of both.

    kept: tokens of the answer that were looked at, where it was too long for a packed row; None = all. skipped: nothing
    of it is trained on. from_truth: nothing was generated, the ground truth is trained on as it is. origin: how the
    rollout came to be, for the record.
    """

    record: Record
    rollout: Rollout
    target: MatchedTarget
    kept: int | None = None
    skipped: bool = False
    from_truth: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)


class Matcher:
    """A matcher of rollouts to the ground truth of their records; an answer is cut before any of its `vision_ids`."""

    def __init__(self, vocab: CoordVocab, options: MatchOptions, vision_ids: Collection[int]) -> None:
        self.vocab = vocab
        self.options = options
        self._vision_ids = frozenset(vision_ids)

    def match(self, record: Record, rollout: Rollout, *, kept: int | None = None) -> Matched:
        """Parse the rollout, or its first `kept` tokens, match its objects, and build what is to be learnt from it."""
        ids = cut_before(rollout.token_ids, self._vision_ids)[:kept]
        further = [cut_before(one, self._vision_ids) for one in rollout.further]
        target = build_target(ids, record.ground_truth, self.vocab, self.options, further=further)
        return Matched(record, rollout, target, kept)

    def object_ends(self, rollout: Rollout) -> tuple[int, ...]:
        """Return after how many tokens each object of a rollout is closed, in order."""
        return object_ends(cut_before(rollout.token_ids, self._vision_ids), self.vocab)


def with_origin(
    matched: Sequence[Matched | BadSample], generated: RolloutBatch, options: MatchOptions
) -> list[Matched]:
    """Return those that were matched, with what the record says of how each came to be and was matched."""
    told = {**generated.origin, "options": asdict(options)}
    return [
        replace(one, origin={**_place(generated.plan, index), **told})
        for index, one in enumerate(matched)
        if isinstance(one, Matched)
    ]


def _place(plan: SeedPlan, index: int) -> dict[str, int]:
    micro_step, place = plan.place(index)
    return {"index": place, "micro_step": micro_step, "seed_base": plan.seed(index) - place}
