"""The ids of the coordinate tokens, and the alignment of token ids with the text that they spell.

`CoordVocab` is all that matching needs of a tokenizer, so any Hugging Face tokenizer will do.
Source: semantics, sections 1 and 4.2.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from stage2_api.coordinates import BINS, coord_token


class MatchingError(ValueError):
    """Inputs contradict each other: a prefix that nothing can follow, different prompt ids, wrong lengths."""


IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

REPLACEMENT = "\ufffd"
VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
# A UTF-8 character has at most four bytes, so at most four tokens can share one; runs of such characters are joined up
# to this length.
_LONGEST_JOIN = 16


@dataclass(frozen=True)
class Alignment:
    """Token ids aligned with their text.

    pieces: the text of each token. starts: (n + 1,) the offset of each piece, and the length of the text. split: the
    tokens that end inside a character; it belongs to the piece of the later token that completes it.
    """

    text: str
    pieces: list[str]
    starts: IntArray
    split: frozenset[int]

    def token_at(self, character: int) -> int:
        """Return the token with the character at this offset, 0 <= character < len(text)."""
        return int(np.searchsorted(self.starts[:-1], character, side="right")) - 1


@dataclass(frozen=True, eq=False)
class CoordVocab:
    """A vocabulary with one token for each coordinate bin.

    ids: (1000,) int64, the id of `<|coord_k|>` at k. decode: spells ids, with special tokens and without clean-up.
    encode: tokenises text without adding special tokens. size: bound of the ids that can be decoded.
    """

    ids: IntArray
    decode: Callable[[list[int]], str]
    encode: Callable[[str], list[int]]
    size: int
    _piece: Callable[[int], str] = field(init=False, repr=False)
    _table: IntArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.ids.shape != (BINS,) or len(np.unique(self.ids)) != BINS or self.ids.min() < 0:
            raise ValueError(f"coordinate ids: {self.ids.shape}; need {BINS} distinct ids >= 0, one for each bin")
        table = np.full(int(self.ids.max()) + 1, -1, dtype=np.int64)
        table[self.ids] = np.arange(BINS)
        object.__setattr__(self, "_table", table)
        object.__setattr__(self, "_piece", cache(lambda token_id: self.decode([token_id])))

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> "CoordVocab":
        """Read the coordinate tokens of a Hugging Face tokenizer. Raises ValueError if one is not a single token."""
        tokens = [coord_token(k) for k in range(BINS)]
        ids = tokenizer.convert_tokens_to_ids(tokens)
        for token, token_id in zip(tokens, ids, strict=True):
            if token_id is None or _decode_with(tokenizer)([token_id]) != token:
                raise ValueError(
                    f"tokenizer: {token} is not one token; the model must know {BINS} coordinate tokens; "
                    "add them with `stage2 prepare MODEL --output DIR`, and train stage 1 on them"
                )
        return cls(
            ids=np.asarray(ids, dtype=np.int64),
            decode=_decode_with(tokenizer),
            encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
            size=len(tokenizer),
        )

    def decode_piece(self, token_id: int) -> str:
        """Return the text of one id decoded alone (cached); part of a character decodes to U+FFFD."""
        return self._piece(token_id)

    def bin_of(self, token_id: int) -> int | None:
        """Return the bin of a coordinate token, None for any other id."""
        found = int(self._table[token_id]) if 0 <= token_id < len(self._table) else -1
        return found if found >= 0 else None

    def bins_of(self, token_ids: IntArray) -> IntArray:
        """Return the bins of an array of ids, -1 where an id is no coordinate token."""
        inside = (token_ids >= 0) & (token_ids < len(self._table))
        return np.where(inside, self._table[np.where(inside, token_ids, 0)], -1)

    def align(self, token_ids: list[int]) -> Alignment:
        """Align ids (all within the vocabulary) with their text; characters split over tokens come out whole."""
        pieces = list(map(self._piece, token_ids))
        text = "".join(pieces)
        split: set[int] = set()
        if REPLACEMENT in text:
            split = self._join_split_characters(token_ids, pieces)
            text = "".join(pieces)
        starts = np.zeros(len(pieces) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)), out=starts[1:])
        return Alignment(text=text, pieces=pieces, starts=starts, split=frozenset(split))

    def _join_split_characters(self, token_ids: list[int], pieces: list[str]) -> set[int]:
        """Rewrite `pieces` in place, so that a character is in the piece of the token that completes it."""
        split: set[int] = set()
        done = 0
        for first in [i for i, piece in enumerate(pieces) if piece.endswith(REPLACEMENT)]:
            if first >= done:
                done = self._join_run(token_ids, pieces, first, split)
        return split

    def _join_run(self, token_ids: list[int], pieces: list[str], first: int, split: set[int]) -> int:
        """Join the run of tokens that starts with `first`; return the token after it."""
        end = min(first + _LONGEST_JOIN, len(token_ids))
        joined = pieces[first]
        emitted = len(joined) - 1
        for i in range(first + 1, end):
            before, joined = joined, self.decode(token_ids[first : i + 1])
            if joined == before + pieces[i]:  # the bytes before do not begin a character
                return i
            pieces[i - 1] = pieces[i - 1].removesuffix(REPLACEMENT)
            split.add(i - 1)
            pieces[i] = joined[emitted:]
            if not joined.endswith(REPLACEMENT):
                return i + 1
            emitted = max(emitted, len(joined) - 1)
        return end


def _decode_with(tokenizer: Any) -> Callable[[list[int]], str]:
    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def vision_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that stand for pixels."""
    known = tokenizer.get_vocab()
    return frozenset(known[token] for token in VISION_TOKENS if token in known)


def cut_before(token_ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return the ids before the first one of `ends`; all of them without one.

    An answer is cut before a token that stands for pixels, since an answer has no pixels to train on.
    """
    end = next((i for i, token_id in enumerate(token_ids) if token_id in ends), len(token_ids))
    return list(token_ids[:end])
