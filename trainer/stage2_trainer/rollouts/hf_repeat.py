"""The end of answers that repeat themselves (`repeat_terminate`): each row's own, while its neighbours go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor

from stage2_api.rollout_matching import RepeatTerminate

OBJECT_KEY = '"object_'


def repeats(answer: Sequence[int], rules: RepeatTerminate) -> bool:
    """Whether an answer's tokens end in a repetition that the rules forbid: of one token, or of a sequence of them."""
    run, size, times = rules.max_consecutive_token_repeats, rules.ngram_size, rules.ngram_repeats
    if run and len(answer) >= run and len(set(answer[-run:])) == 1:
        return True
    last = list(answer[-size:])
    return len(answer) >= size * times and list(answer[-size * times :]) == last * times


def holds_objects(answer: Sequence[int], most: int, piece: Callable[[int], str]) -> bool:
    """Whether an answer's text holds `most` object keys; the text is put together only where a key has just come."""
    just_written = "".join(map(piece, answer[-len(OBJECT_KEY) :]))
    return OBJECT_KEY in just_written and "".join(map(piece, answer)).count(OBJECT_KEY) >= most


@dataclass
class RepeatTermination(LogitsProcessor):
    """A processor of logits that leaves a row which breaks the rules nothing but the end of turn.

    prompt_len: tokens before the answers, padding included. end: id of the end of turn. piece: the text of one id.
    `ended` has the rows whose end was forced.
    """

    rules: RepeatTerminate
    prompt_len: int
    end: int
    piece: Callable[[int], str]
    ended: set[int] = field(default_factory=set, init=False)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores (rows, vocabulary), -inf but for the end where a row must end."""
        if input_ids.shape[1] - self.prompt_len < self.rules.min_new_tokens:
            return scores
        rows = [i for i, ids in enumerate(input_ids[:, self.prompt_len :].tolist()) if self._must_end(ids)]
        if rows:
            self.ended.update(rows)
            scores = scores.clone()  # type: ignore[assignment]
            scores[rows] = -torch.inf
            scores[rows, self.end] = 0.0
        return scores

    def _must_end(self, answer: Sequence[int]) -> bool:
        if self.end in answer:  # over already; what follows is padding
            return False
        most = self.rules.max_object_keys
        return repeats(answer, self.rules) or (most is not None and holds_objects(answer, most, self.piece))
