"""The tokens of `Y_train`: the kept parts of the rollout, and the text that is inserted or appended.

By default the prefix is unchanged and the missed objects follow (semantics, section 4.6). If objects are removed, or
missed ones are inserted, the remaining objects keep their own tokens, and their keys are renumbered.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from stage2_trainer.matching.assign import Matching, MatchOptions
from stage2_trainer.matching.ground_truth import GroundTruth, append_text, object_entries
from stage2_trainer.matching.parse import ParsedObject, ParsedRollout
from stage2_trainer.matching.tokens import Alignment, CoordVocab

_BETWEEN = re.compile(r'\s*(,?)\s*"object_[0-9]+"\s*:\s*')


@dataclass(frozen=True)
class Written:
    """Inserted text, encoded on its own. taught: whether it is supervised; if not, it only leads to the next part."""

    text: str
    taught: bool


@dataclass(frozen=True)
class Kept:
    """A kept stretch of the prefix (characters, end exclusive), and the valid objects that end in it."""

    start: int
    end: int
    objects: tuple[int, ...] = ()


Part = Written | Kept
Slot = tuple[bool, int]  # whether the object is a missed one, and its index among the true or the valid ones


@dataclass(frozen=True)
class LaidOut:
    """`Y_train`, and the origin of its tokens.

    ids: its tokens. prefix_len: tokens before the first taught one. taught: the start and ids of each taught text.
    missed: the true objects in these texts, in order. moved: from a token's position in the rollout to its position
    here. begun: the start of each kept valid object, including what leads to it. texts: of prefix and tail.
    """

    ids: tuple[int, ...]
    prefix_len: int
    taught: tuple[tuple[int, list[int]], ...]
    missed: tuple[int, ...]
    moved: dict[int, int]
    begun: dict[int, int]
    texts: tuple[str, str]


def lay_out(
    parsed: ParsedRollout, gt: GroundTruth, matching: Matching, removed: Sequence[int], vocab: CoordVocab,
    options: MatchOptions,
) -> LaidOut:  # fmt: skip
    """Return `Y_train` of an answer. removed: indices of the valid objects to take out."""
    missed = matching.false_negatives
    among = missed and (options.missed_place == "shuffled" or (options.missed_place == "sorted" and matching.pairs))
    anew = removed or among
    prefix = _Prefix(parsed, vocab, parsed.own_len if anew else len(parsed.prefix_ids))
    if not anew:
        tail = append_text(parsed.prefix_text, [gt.objects[i] for i in missed], (parsed.max_object_index or 0) + 1)
        looked_up = range(len(parsed.valid_objects)) if options.unmatched_objects == "penalised" else ()
        return prefix.assemble([Kept(0, len(parsed.prefix_text), tuple(looked_up)), Written(tail, taught=True)], missed)
    kept = [i for i in range(len(parsed.valid_objects)) if i not in set(removed)]
    slots = _slots(kept, matching, options, seed=str(parsed.prefix_ids))
    return prefix.assemble(list(prefix.parts(slots, gt)), [index for is_missed, index in slots if is_missed])


def _slots(kept: Sequence[int], matching: Matching, options: MatchOptions, *, seed: str) -> list[Slot]:
    """Return the objects of `Y_train` in order.

    seed: of shuffled positions. It comes from the answer, so that they can be reproduced from it.
    """
    slots: list[Slot] = [(False, i) for i in kept]
    missed = list(matching.false_negatives)
    truth_of = {pair.pred: pair.gt for pair in matching.pairs}
    if options.missed_place == "shuffled":
        rng = random.Random(seed)
        rng.shuffle(missed)
        for one in missed:
            slots.insert(rng.randint(0, len(slots)), (True, one))
        return slots
    for one in missed:
        later = (at for at, (is_missed, i) in enumerate(slots) if not is_missed and truth_of.get(i, -1) > one)
        at = next(later, len(slots)) if options.missed_place == "sorted" else len(slots)
        slots.insert(at, (True, one))
    return slots


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

    def parts(self, slots: Sequence[Slot], gt: GroundTruth) -> Iterator[Part]:
        """Yield the parts of an answer with these objects, their keys numbered from 1."""
        stretch = Kept(0, self._text.index("{") + 1)
        number = 0
        for is_missed, group in groupby(slots, key=lambda slot: slot[0]):
            indices = [index for _, index in group]
            if is_missed:
                yield from (stretch,) if stretch.end > stretch.start else ()
                entries = object_entries([gt.objects[i] for i in indices], number + 1)
                stretch = Kept(0, 0)
                yield Written((", " if number else "") + entries, taught=True)
                number += len(indices)
                continue
            for index in indices:
                number += 1
                if self._continues(stretch, index, number):
                    stretch = Kept(stretch.start, self._objects[index].span[1], (*stretch.objects, index))
                    continue
                yield from (stretch,) if stretch.end > stretch.start else ()
                yield Written(f'{", " if number > 1 else ""}"object_{number}": ', taught=False)
                stretch = Kept(*self._objects[index].span, (index,))
        yield from (stretch,) if stretch.end > stretch.start else ()
        yield Written("}", taught=True)

    def _continues(self, stretch: Kept, index: int, number: int) -> bool:
        """Whether an object directly follows a stretch, and already has the right key."""
        one, before = self._objects[index], self._ends_before[index]
        between = _BETWEEN.fullmatch(self._text[before : one.span[0]])
        follows = bool(stretch.end) and stretch.end == before and one.index == number
        return follows and between is not None and bool(between[1]) == (number > 1)

    def assemble(self, parts: Sequence[Part], missed: Sequence[int]) -> LaidOut:
        """Return the tokens of these parts. missed: the true objects in inserted text, in order.

        All text between two kept stretches is encoded at once, together with the pieces of tokens that reach over their
        edges: encoded alone, it would have token boundaries that the model never generates.
        """
        ids: list[int] = []
        taught: list[tuple[int, list[int]]] = []
        moved: dict[int, int] = {}
        begun: dict[int, int] = {}
        texts = ["", ""]
        inserted = _Inserted()
        for part in parts:
            if isinstance(part, Written):
                inserted.add(part.text, taught=part.taught, leads=not part.taught)
                texts[bool(taught) or inserted.teaches] += part.text
                continue
            first, last, before, after = self._whole_tokens(part)
            inserted.add(before)
            texts[bool(taught) or inserted.teaches] += self._text[part.start : part.end]
            if first == last:
                continue
            lead = inserted.write(self._vocab, ids, taught)
            inserted = _Inserted()
            inserted.add(after)
            moved.update({token: len(ids) + token - first for token in range(first, last)})
            ids += self._ids[first:last]
            begun.update({one: self._begins(one, part, lead, moved) for one in part.objects})
        inserted.write(self._vocab, ids, taught)
        found = tuple(ids), taught[0][0], tuple(taught), tuple(missed)
        return LaidOut(*found, moved, begun, (texts[0], texts[1]))

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


class _Inserted:
    """The text between two kept stretches: pieces of tokens that were cut, missed objects, what leads to the next."""

    def __init__(self) -> None:
        self._text = ""
        self._taught = (0, 0)  # characters, end exclusive
        self._lead = 0  # where the next object's lead begins

    @property
    def teaches(self) -> bool:
        """Whether any of it is taught."""
        return self._taught[1] > 0

    def add(self, text: str, *, taught: bool = False, leads: bool = False) -> None:
        """Append text; consecutive taught texts are one."""
        start, self._text = len(self._text), self._text + text
        if taught:
            self._taught = (self._taught[0] if self.teaches else start, len(self._text))
        if leads:
            self._lead = start

    def write(self, vocab: CoordVocab, ids: list[int], taught: list[tuple[int, list[int]]]) -> int:
        """Encode the text onto `ids`, and note its taught tokens, which are those whose last character is taught.

        Return the position of the token that holds the first character of what leads to the next object.
        """
        at, written = len(ids), vocab.encode(self._text) if self._text else []
        ids += written
        whole = self._taught == (0, len(self._text))
        if whole or not written:
            taught += [(at, written)] if self.teaches else []
            return at
        aligned = vocab.align(written)
        first, last = np.searchsorted(aligned.starts[1:], self._taught, side="right").tolist()
        taught += [(at + first, written[first:last])] if self.teaches else []
        return at + aligned.token_at(min(self._lead, len(aligned.text) - 1))
