"""An answer's text as scored objects, by the trainer's own parser and without a tokenizer.

The parser reads token ids. Here each coordinate token is an id, and so is each other character: whatever a model's own
tokenizer would have made of the text, the objects are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from stage2_api.coordinates import BINS, COORD_TOKEN, coord_token
from stage2_trainer.matching import CoordVocab, GTObject, ParsedRollout, parse_rollout

CHARACTERS = 0x110000
LOOPED_OBJECTS = 3
"""An object that stands so many times in a row is a loop."""
CUT_BY_LENGTH, CUT_BY_REPETITION = "length", "repetition"


@dataclass(frozen=True)
class ReadAnswer:
    """What an answer says.

    objects: those that can be matched, in its order. scores: of each, exp of the mean log-probability of its coordinate
    tokens; None where the rollout has none. parsed: it is whole, and each of its objects can be matched. truncated: it
    was not closed. looped: it was ended because it repeated itself, or has one object three times in a row.
    """

    objects: tuple[GTObject, ...]
    scores: tuple[float, ...] | None
    parsed: bool
    truncated: bool
    looped: bool


NO_ANSWER = ReadAnswer((), (), parsed=False, truncated=False, looped=False)


def read_answer(text: str, logprobs: Sequence[float] | None = None, finish_reason: str | None = None) -> ReadAnswer:
    """Return what a text says. logprobs: of its coordinate tokens, in order. finish_reason: as servers say it."""
    vocab = text_vocab()
    ids = vocab.encode(text)
    parsed = parse_rollout(ids, vocab)
    scores = None
    if logprobs is not None:
        number = np.cumsum(np.asarray(ids) < BINS) - 1  # of the coordinate token at each position
        scores = tuple(
            _score([logprobs[number[place]] for place in one.token_positions]) for one in parsed.valid_objects
        )
    return answer_of(parsed, finish_reason, scores)


def answer_of(parsed: ParsedRollout, finish_reason: str | None, scores: tuple[float, ...] | None = None) -> ReadAnswer:
    """Return what a parsed answer says; see `ReadAnswer`."""
    objects = tuple(GTObject(one.desc, one.kind or "bbox", one.bins) for one in parsed.valid_objects)
    truncated = parsed.truncated or finish_reason == CUT_BY_LENGTH
    return ReadAnswer(
        objects,
        scores,
        parsed=parsed.clean and not truncated and not parsed.dropped and not parsed.notes,
        truncated=truncated,
        looped=finish_reason == CUT_BY_REPETITION or _loops(objects),
    )


def coordinates_in(text: str) -> int:
    """Return how many coordinate tokens a text has."""
    return len(COORD_TOKEN.findall(text))


@cache
def text_vocab() -> CoordVocab:
    """Return the vocabulary of coordinate tokens (0 to 999) and single characters (from 1000)."""
    return CoordVocab(ids=np.arange(BINS), decode=_decode, encode=_encode, size=BINS + CHARACTERS)


def _decode(ids: list[int]) -> str:
    return "".join(coord_token(one) if one < BINS else chr(one - BINS) for one in ids)


def _encode(text: str) -> list[int]:
    ids: list[int] = []
    at = 0
    for token in COORD_TOKEN.finditer(text):
        ids += [ord(character) + BINS for character in text[at : token.start()]]
        ids.append(int(token[1]))
        at = token.end()
    return ids + [ord(character) + BINS for character in text[at:]]


def _score(logprobs: Sequence[float]) -> float:
    return math.exp(sum(logprobs) / len(logprobs))


def _loops(objects: Sequence[GTObject]) -> bool:
    windows = (objects[start : start + LOOPED_OBJECTS] for start in range(len(objects) - LOOPED_OBJECTS + 1))
    return any(len(set(window)) == 1 for window in windows)
