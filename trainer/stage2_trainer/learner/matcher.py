"""A record and its answer, parsed and matched; an answer too long for a packed row is cut or skipped.

Training and evaluation both begin with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stage2_api.rollout_matching import Overlong
from stage2_trainer.data.records import Record
from stage2_trainer.matching import CoordVocab, MatchedTarget, MatchOptions, build_target, cut_before, object_ends
from stage2_trainer.packing.rows import PackingError, over_cap
from stage2_trainer.rollouts.bad_samples import BadSample
from stage2_trainer.rollouts.rollout_source import RolloutBatch
from stage2_trainer.wire.requests import Rollout


@dataclass(frozen=True)
class Matched:
    """One record, the rollout that answers it, and the target that matching builds from both.

    kept: the number of answer tokens that were used, where the answer was too long for a packed row; None = all.
    skipped: nothing of it is trained on. from_truth: nothing was generated, the target is the ground truth itself.
    origin: how the rollout was made, for the record.
    """

    record: Record
    rollout: Rollout
    target: MatchedTarget
    kept: int | None = None
    skipped: bool = False
    from_truth: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)


class Matcher:
    """Matches rollouts to the ground truth of their records; an answer is cut before any of its `vision_ids`."""

    def __init__(self, vocab: CoordVocab, options: MatchOptions, vision_ids: Collection[int]) -> None:
        self.vocab = vocab
        self.options = options
        self._vision_ids = frozenset(vision_ids)

    def match(self, record: Record, rollout: Rollout, *, kept: int | None = None) -> Matched:
        """Parse the rollout, or its first `kept` tokens, match its objects, and build the training target."""
        ids = cut_before(rollout.token_ids, self._vision_ids)[:kept]
        further = [cut_before(one, self._vision_ids) for one in rollout.further]
        target = build_target(ids, record.ground_truth, self.vocab, self.options, further=further)
        return Matched(record, rollout, target, kept)

    def object_ends(self, rollout: Rollout) -> tuple[int, ...]:
        """Return the number of tokens up to the end of each object of a rollout, in order."""
        return object_ends(cut_before(rollout.token_ids, self._vision_ids), self.vocab)


def with_origin(matched: Sequence[Matched | BadSample], batch: RolloutBatch, options: MatchOptions) -> list[Matched]:
    """Return the matched samples with their origin: seeds, servers, sync and matching options."""
    shared = {**batch.origin, "options": asdict(options)}
    found = []
    for index, one in enumerate(matched):
        if isinstance(one, Matched):
            micro_step, place = batch.plan.place(index)
            seeds = {"index": place, "micro_step": micro_step, "seed_base": batch.plan.seed(index) - place}
            found.append(replace(one, origin={**seeds, **shared}))
    return found


class OverlongError(PackingError):
    """One sample's segment is longer than a row."""


@dataclass(frozen=True)
class OverlongRule:
    """A rule for answers whose segments would exceed `length` tokens (`post_rollout_overlong`).

    what: `error`, `cut` or `skip`; None = they are bad samples.
    """

    length: int
    what: Overlong | None

    def fit(self, matched: Matched, matcher: Matcher, encoded_len: Callable[[Matched], int]) -> Matched:
        """Return a rollout that fits a row: unchanged, cut after one of its objects, or marked as skipped.

        With `error` it is returned unchanged, and packing refuses it.

        Raises:
            OverlongError: it does not fit, and there is no rule for that.
        """
        if self.what == "error" or encoded_len(matched) <= self.length:
            return matched
        if self.what is None:
            raise OverlongError(over_cap(encoded_len(matched), self.length))
        cut = self._cut(matched, matcher, encoded_len) if self.what == "cut" else None
        return cut or replace(matched, skipped=True)

    def _cut(self, matched: Matched, matcher: Matcher, encoded_len: Callable[[Matched], int]) -> Matched | None:
        """Remove objects from the end until the segment fits; None: the true objects alone are too long.

        Cutting one half of a matched pair appends its true object as a miss, so it may take several rounds.
        """
        ends = (0, *matcher.object_ends(matched.rollout))
        kept, left = len(matched.rollout.token_ids), len(ends)
        while left:
            excess = encoded_len(matched) - self.length
            left = next((k for k in range(left - 1, -1, -1) if ends[k] <= kept - excess), 0)
            kept = ends[left]
            matched = matcher.match(matched.record, matched.rollout, kept=kept)
            if encoded_len(matched) <= self.length:
                return matched
        return None
