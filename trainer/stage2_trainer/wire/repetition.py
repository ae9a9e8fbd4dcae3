"""The end of answers that repeat themselves, as a server checks it: vLLM's `repetition_detection`.

A server knows one check, of sequences between two lengths that stand several times in a row at an answer's end. The
rules of `repeat_terminate` become the one that finds whatever repeats itself at most every `ngram_size` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stage2_api.rollout_matching import RepeatTerminate


@dataclass(frozen=True)
class RepetitionDetection:
    """The fields of a request's `repetition_detection`, by vLLM's names; lengths in tokens, both ends included."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int

    @classmethod
    def from_rules(cls, rules: RepeatTerminate) -> RepetitionDetection | None:
        """Return the check that the rules make on a server; None where they are off.

        Every loop of at most `ngram_size` tokens is also one of some length above half of that, so shorter sequences
        need no look: a loop ends at the latest after `ngram_size * ngram_repeats` tokens, a run of one token earlier.
        """
        if not rules.enabled:
            return None
        return cls(rules.ngram_size, rules.ngram_size // 2 + 1, rules.ngram_repeats)

    def found(self, answer: Sequence[int]) -> bool:
        """Whether an answer's tokens end in a sequence that stands `min_count` times in a row."""
        longest = min(self.max_pattern_size, len(answer) // self.min_count)
        return any(self._stands(answer, size) for size in range(max(self.min_pattern_size, 1), longest + 1))

    def _stands(self, answer: Sequence[int], size: int) -> bool:
        tail = answer[len(answer) - size * self.min_count :]
        return tail[size:] == tail[:-size]
