"""The tokens of `Y_train`: the kept parts of the rollout, and the tail of missed objects.

By default the prefix is unchanged (semantics, section 4.6). If objects are removed, or if the answer's
text is trained on and its keys are not 1, 2, 3, ..., the remaining objects keep their own tokens, and their keys are
renumbered (section 20, "Tokens").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stage2_trainer.matching.assign import Matching, MatchOptions
from stage2_trainer.matching.ground_truth import GroundTruth, GTObject, append_text
from stage2_trainer.matching.parse import ParsedObject, ParsedRollout
from stage2_trainer.matching.scan import WHITE_SPACE
from stage2_trainer.matching.tokens import Alignment, CoordVocab

_SPACE = f"[{WHITE_SPACE}]*"
_LEAD = re.compile(f'{_SPACE}(?:(,){_SPACE})?"object_([0-9]+)"{_SPACE}:{_SPACE}')


@dataclass(frozen=True)
class Kept:
    """A kept stretch of the prefix (characters, end exclusive), and the valid objects that end in it.

    lead: inserted text that leads to it.
    """

    start: int
    end: int
    objects: tuple[int, ...] = ()
    lead: str = ""


@dataclass(frozen=True)
class LaidOut:
    """`Y_train`, and the origin of its tokens.

    ids: its tokens. prefix_len: tokens before the tail. moved: from a token's position in the rollout to its position
    here. begun: the start of each kept valid object, including what leads to it. texts: of prefix and tail.
    """

    ids: tuple[int, ...]
    prefix_len: int
    moved: dict[int, int]
    begun: dict[int, int]
    texts: tuple[str, str]


def lay_out(
    parsed: ParsedRollout, gt: GroundTruth, matching: Matching, removed: Sequence[int], vocab: CoordVocab,
    options: MatchOptions,
) -> LaidOut:  # fmt: skip
    """Return `Y_train` of an answer. removed: indices of the valid objects to take out."""
    kept = sorted({*range(len(parsed.valid_objects))} - {*removed})
    if removed or (options.matched_text_weight and not _plainly_numbered(parsed)):
        prefix, next_key = _Prefix(parsed, vocab, parsed.own_len), len(kept) + 1
        stretches = prefix.stretches(kept)
    else:
        prefix, next_key = _Prefix(parsed, vocab, len(parsed.prefix_ids)), (parsed.max_object_index or 0) + 1
        looked_up = kept if options.unmatched_objects == "penalised" else []
        stretches = [Kept(0, len(parsed.prefix_text), tuple(looked_up))]
    return prefix.assemble(stretches, [gt.objects[i] for i in matching.missed], next_key)


def _plainly_numbered(parsed: ParsedRollout) -> bool:
    """Whether the objects of the prefix, broken ones too, have the keys 1, 2, 3, and nothing else leads to them."""
    end = parsed.prefix_text.index("{") + 1
    for number, one in enumerate((each for each in parsed.objects if each.in_prefix), 1):
        start, stop = one.span
        if start < 0 or not _leads_to(parsed.prefix_text[end:start], number):
            return False
        end = stop
    return True


def _leads_to(text: str, number: int) -> bool:
    """Whether this is all that may lead to the object with this number: a comma, except to the first, and its key."""
    lead = _LEAD.fullmatch(text)
    return lead is not None and (bool(lead[1]), lead[2]) == (number > 1, str(number))


class _Prefix:
    """The prefix of an answer, from which stretches are kept; the first `length` tokens of it may stay."""

    def __init__(self, parsed: ParsedRollout, vocab: CoordVocab, length: int) -> None:
        self._length = length
        self._text = parsed.prefix_text
        self._ids = list(parsed.prefix_ids)
        self._objects: tuple[ParsedObject, ...] = parsed.valid_objects
        self._ends_before = parsed.ends_before
        self._vocab = vocab

    @cached_property
    def _aligned(self) -> Alignment:
        return self._vocab.align(self._ids)

    def stretches(self, kept: Sequence[int]) -> list[Kept]:
        """Return the stretches of an answer with only these objects, their keys numbered from 1."""
        found = [Kept(0, self._text.index("{") + 1)]
        for number, index in enumerate(kept, 1):
            start, end = self._objects[index].span
            if self._continues(found[-1].end, index, number):
                found[-1] = replace(found[-1], end=end, objects=(*found[-1].objects, index))
            else:
                found.append(Kept(start, end, (index,), f'{", " if number > 1 else ""}"object_{number}": '))
        return found

    def _continues(self, end: int, index: int, number: int) -> bool:
        """Whether an object directly follows the stretch that ends here, and already has the right key."""
        before, start = self._ends_before[index], self._objects[index].span[0]
        return end == before and _leads_to(self._text[before:start], number)

    def assemble(self, stretches: Sequence[Kept], missed: Sequence[GTObject], next_key: int) -> LaidOut:
        """Return the tokens of these stretches and of the tail with the missed objects.

        All text between two kept stretches is encoded at once, together with the pieces of tokens that reach over their
        edges: encoded alone, it would have token boundaries that the model never generates.
        """
        ids: list[int] = []
        moved: dict[int, int] = {}
        begun: dict[int, int] = {}
        between = ""
        for part in stretches:
            first, last, before, after = self._whole_tokens(part)
            begin, between = len(between), between + part.lead + before
            if first == last:
                continue
            lead, between = self._write(between, begin, ids), after
            moved.update({token: len(ids) + token - first for token in range(first, last)})
            ids += self._ids[first:last]
            begun.update({one: self._begins(one, part, lead, moved) for one in part.objects})
        text = "".join(part.lead + self._text[part.start : part.end] for part in stretches)
        tail = append_text(text, missed, next_key)
        prefix_len = self._write(between + tail, len(between), ids)
        return LaidOut(tuple(ids), prefix_len, moved, begun, (text, tail))

    def _write(self, text: str, at: int, ids: list[int]) -> int:
        """Encode text onto `ids`. Return the position of the token that has its character `at`."""
        start, written = len(ids), self._vocab.encode(text) if text else []
        ids += written
        return start + (self._vocab.align(written).token_at(at) if at else 0)

    def _begins(self, index: int, part: Kept, lead: int, moved: dict[int, int]) -> int:
        before = self._ends_before[index]
        if not part.start <= before < part.end:
            return lead
        return moved.get(self._aligned.token_at(before), lead)

    def _whole_tokens(self, part: Kept) -> tuple[int, int, str, str]:
        """Return the tokens that lie whole in a stretch (first, end exclusive), and its text before and after them."""
        if (part.start, part.end, self._length) == (0, len(self._text), len(self._ids)):
            return 0, self._length, "", ""
        aligned = self._aligned
        first = int(np.searchsorted(aligned.starts[:-1], part.start, side="left"))
        last = min(int(np.searchsorted(aligned.starts[1:], part.end, side="right")), self._length)
        while last > first and last - 1 in aligned.split:  # it ends inside a character that is not kept
            last -= 1
        if last <= first:
            return first, first, self._text[part.start : part.end], ""
        start, end = int(aligned.starts[first]), int(aligned.starts[last])
        return first, last, self._text[part.start : start], self._text[end : part.end]
