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

from stage2_trainer.matching.assign import Matching, MatchOptions
from stage2_trainer.matching.ground_truth import GroundTruth, append_text, object_entries
from stage2_trainer.matching.parse import ParsedObject, ParsedRollout
from stage2_trainer.matching.tokens import Alignment, CoordVocab

_BETWEEN = re.compile(r'\s*,?\s*"object_[0-9]+"\s*:\s*')


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
    among = options.missed_place != "tail" and missed and matching.pairs
    prefix = _Prefix(parsed, vocab)
    if not removed and not among:
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
    """The prefix of an answer, from which stretches are kept."""

    def __init__(self, parsed: ParsedRollout, vocab: CoordVocab) -> None:
        self._text = parsed.prefix_text
        self._ids = list(parsed.prefix_ids)
        self._objects: tuple[ParsedObject, ...] = parsed.valid_objects
        # the end of the value before each valid object: there the model chose to continue
        self._ends_before: list[int] = []
        end = parsed.prefix_text.index("{") + 1
        for one in parsed.objects:
            if one.valid:
                self._ends_before.append(end)
            end = one.span[1] if one.in_prefix and one.span[1] >= 0 else end
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
        between = self._text[before : one.span[0]]
        follows = bool(stretch.end) and stretch.end == before and one.index == number
        return follows and _BETWEEN.fullmatch(between) is not None

    def assemble(self, parts: Sequence[Part], missed: Sequence[int]) -> LaidOut:
        """Return the tokens of these parts. missed: the true objects in inserted text, in order."""
        ids: list[int] = []
        taught: list[tuple[int, list[int]]] = []
        moved: dict[int, int] = {}
        begun: dict[int, int] = {}
        texts = ["", ""]
        lead_start = 0
        for part in _joined(parts):
            at = len(ids)
            if isinstance(part, Kept):
                ids += self._stretch(part, at, moved)
                texts[bool(taught)] += self._text[part.start : part.end]
                begun.update({one: self._begins(one, part, lead_start, moved) for one in part.objects})
                continue
            written = self._vocab.encode(part.text)
            taught += [(at, written)] if part.taught else []
            texts[bool(taught)] += part.text
            lead_start = at
            ids += written
        found = tuple(ids), taught[0][0], tuple(taught), tuple(missed)
        return LaidOut(*found, moved, begun, (texts[0], texts[1]))

    def _begins(self, index: int, part: Kept, lead_start: int, moved: dict[int, int]) -> int:
        before = self._ends_before[index]
        if not part.start <= before < part.end:
            return lead_start
        token = self._aligned.token_at(before)
        return moved.get(token, lead_start)

    def _stretch(self, part: Kept, at: int, moved: dict[int, int]) -> list[int]:
        """Return the tokens of a stretch, re-encoding those that its ends cut, and record the others in `moved`."""
        if (part.start, part.end) == (0, len(self._text)):
            moved.update({token: at + token for token in range(len(self._ids))})
            return self._ids
        first, last = self._aligned.token_at(part.start), self._aligned.token_at(part.end - 1)
        found: list[int] = []
        for token in range(first, last + 1):
            start = int(self._aligned.starts[token])
            piece = self._aligned.pieces[token]
            inside = piece[max(part.start - start, 0) : part.end - start]
            if inside == piece:
                moved[token] = at + len(found)
                found.append(self._ids[token])
            else:
                found += self._vocab.encode(inside)
        return found


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join taught texts that follow one another, so that they are encoded together."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Written) and isinstance(last, Written) and part.taught and last.taught:
            found[-1] = Written(last.text + part.text, taught=True)
        else:
            found.append(part)
    return found
