"""Answers that are too long for a packed row (`post_rollout_overlong`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stage2_api.rollout_matching import Overlong
from stage2_trainer.learner.matcher import Matched, Matcher
from stage2_trainer.packing.errors import PackingError, over_cap


class OverlongError(PackingError):
    """One sample's segment is longer than a row."""


@dataclass(frozen=True)
class OverlongRule:
    """A rule for answers whose segments would have more than `length` tokens. what: None = they are bad samples."""

    length: int
    what: Overlong | None

    def fitted(self, matched: Matched, matcher: Matcher, encoded_len: Callable[[Matched], int]) -> Matched:
        """Return a rollout that fits a row: as it is, cut after one of its objects, or marked as skipped.

        With `error` it is returned as it is, and packing refuses it.

        Raises:
            OverlongError: it fits none, and no rule says what becomes of it.
        """
        if self.what == "error" or encoded_len(matched) <= self.length:
            return matched
        if self.what is None:
            raise OverlongError(over_cap(encoded_len(matched), self.length))
        return (self._cut(matched, matcher, encoded_len) if self.what == "cut" else None) or replace(
            matched, skipped=True
        )

    def _cut(self, matched: Matched, matcher: Matcher, encoded_len: Callable[[Matched], int]) -> Matched | None:
        """Take objects from the end until the segment fits; None: the true objects alone are too long.

        A pair that is taken apart so comes back as a missed object at the end: that is why it may take several turns.
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
