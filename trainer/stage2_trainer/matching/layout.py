"""The tokens of `Y_train`: what stays of the rollout, and what is written into it or after it.

By default the prefix stays as it is and the missed objects follow (semantics, section 4.6). Where objects are taken out
or missed ones stand among the others, the objects that stay keep their own tokens; only their keys are counted anew.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from stage2_trainer.matching.assign import Matching
from stage2_trainer.matching.ground_truth import GroundTruth, append_text, object_entries
from stage2_trainer.matching.options import MatchOptions
from stage2_trainer.matching.parse import ParsedObject, ParsedRollout
from stage2_trainer.matching.tokens import Alignment, CoordVocab

_BETWEEN = re.compile(r'\s*,?\s*"object_[0-9]+"\s*:\s*')


@dataclass(frozen=True)
class Written:
    """Text that is encoded alone. taught: it is supervised; else it only leads on to what the rollout said."""

    text: str
    taught: bool


@dataclass(frozen=True)
class Kept:
    """A stretch of the prefix that stays (characters, end exclusive), and the valid objects that end in it."""

    start: int
    end: int
    objects: tuple[int, ...] = ()


Part = Written | Kept
Slot = tuple[bool, int]  # whether it is a missed object, and its index: of a true object, else of a valid one


@dataclass(frozen=True)
class LaidOut:
    """`Y_train` with what came from where.

    ids: its tokens. prefix_len: those before the first that is taught. taught: where written text that is taught
    begins, and its ids. missed: the true objects in there, in order. moved: a token's place in the rollout to its place
    here. begun: where each valid object that stays begins, with what leads on to it, where that is asked for. texts: of
    prefix and tail.
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
    """Return `Y_train` of an answer. removed: its valid objects that are taken out."""
    missed = matching.false_negatives
    among = options.missed_place != "tail" and missed and matching.pairs
    prefix = _Prefix(parsed, vocab)
    if not removed and not among:
        tail = append_text(parsed.prefix_text, [gt.objects[i] for i in missed], (parsed.max_object_index or 0) + 1)
        looked_up = range(len(parsed.valid_objects)) if options.unmatched_objects == "penalised" else ()
        return prefix.written([Kept(0, len(parsed.prefix_text), tuple(looked_up)), Written(tail, taught=True)], missed)
    kept = [i for i in range(len(parsed.valid_objects)) if i not in set(removed)]
    slots = _slots(kept, matching, options, seed=str(parsed.prefix_ids))
    return prefix.written(list(prefix.parts(slots, gt)), [index for is_missed, index in slots if is_missed])


def _slots(kept: Sequence[int], matching: Matching, options: MatchOptions, *, seed: str) -> list[Slot]:
    """Return the objects of `Y_train` in order.

    seed: of a place that is drawn. It is the answer's own, so that who has the answer can draw the same again.
    """
    slots: list[Slot] = [(False, i) for i in kept]
    missed = list(matching.false_negatives)
    truth_of = {pair.pred: pair.gt for pair in matching.pairs}
    if options.missed_place == "shuffled":
        drawn = random.Random(seed)
        drawn.shuffle(missed)
        for one in missed:
            slots.insert(drawn.randint(0, len(slots)), (True, one))
        return slots
    for one in missed:
        later = (at for at, (is_missed, i) in enumerate(slots) if not is_missed and truth_of.get(i, -1) > one)
        at = next(later, len(slots)) if options.missed_place == "sorted" else len(slots)
        slots.insert(at, (True, one))
    return slots


class _Prefix:
    """The prefix of an answer, stretches of which are taken over."""

    def __init__(self, parsed: ParsedRollout, vocab: CoordVocab) -> None:
        self._text = parsed.prefix_text
        self._ids = list(parsed.prefix_ids)
        self._objects: tuple[ParsedObject, ...] = parsed.valid_objects
        # Where the value before each valid object ends: there the model chose to go on.
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
        """Yield the parts of an answer with these objects, keys counted from 1."""
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
                if self._goes_on(stretch, index, number):
                    stretch = Kept(stretch.start, self._objects[index].span[1], (*stretch.objects, index))
                    continue
                yield from (stretch,) if stretch.end > stretch.start else ()
                yield Written(f'{", " if number > 1 else ""}"object_{number}": ', taught=False)
                stretch = Kept(*self._objects[index].span, (index,))
        yield from (stretch,) if stretch.end > stretch.start else ()
        yield Written("}", taught=True)

    def _goes_on(self, stretch: Kept, index: int, number: int) -> bool:
        """Whether an object stands right behind a stretch, under the key that it shall have."""
        one, before = self._objects[index], self._ends_before[index]
        between = self._text[before : one.span[0]]
        follows = bool(stretch.end) and stretch.end == before and one.index == number
        return follows and _BETWEEN.fullmatch(between) is not None

    def written(self, parts: Sequence[Part], missed: Sequence[int]) -> LaidOut:
        """Return the tokens of an answer of these parts. missed: the true objects that are written, in order."""
        ids: list[int] = []
        taught: list[tuple[int, list[int]]] = []
        moved: dict[int, int] = {}
        begun: dict[int, int] = {}
        texts = ["", ""]
        led_on = 0
        for part in _joined(parts):
            at = len(ids)
            if isinstance(part, Kept):
                ids += self._stretch(part, at, moved)
                texts[bool(taught)] += self._text[part.start : part.end]
                begun.update({one: self._begins(one, part, led_on, moved) for one in part.objects})
                continue
            written = self._vocab.encode(part.text)
            taught += [(at, written)] if part.taught else []
            texts[bool(taught)] += part.text
            led_on = at
            ids += written
        found = tuple(ids), taught[0][0], tuple(taught), tuple(missed)
        return LaidOut(*found, moved, begun, (texts[0], texts[1]))

    def _begins(self, index: int, part: Kept, led_on: int, moved: dict[int, int]) -> int:
        before = self._ends_before[index]
        if not part.start <= before < part.end:
            return led_on
        token = self._aligned.token_at(before)
        return moved.get(token, led_on)

    def _stretch(self, part: Kept, at: int, moved: dict[int, int]) -> list[int]:
        """Return the tokens of a stretch, those at its ends replaced where it cuts them, and note where they went."""
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
    """Return the parts with written texts that follow one another and are both taught as one: so they are encoded."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Written) and isinstance(last, Written) and part.taught and last.taught:
            found[-1] = Written(last.text + part.text, taught=True)
        else:
            found.append(part)
    return found
