"""All segments of an accumulation window in exactly as many rows as it has micro-steps, or a proof that they do not
fit.

Longest first onto the emptiest row nearly always fits and balances the rows. Where it does not, a bound, a complete
search of a few steps, linear programming and a complete search of many steps follow, until one of them decides. Source:
semantics, section 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stage2_trainer.packing.bound import Filling, Fillings, least_rows
from stage2_trainer.packing.errors import PackingError, check_lengths

Segment = tuple[int, int]  # length, position in the order of falling length

_FEW_STEPS = 20_000
_MANY_STEPS = 500_000
_DIVES = 4


def pack_window(lengths: Sequence[int], cap: int, rows: int) -> list[list[int]]:
    """Partition the segments into exactly `rows` rows, none empty, none longer than `cap` tokens.

    Returns each row's indices (rising), rows ordered by their first segment. Deterministic. PackingError when no
    partition exists, or, for some windows filled to the last few tokens, when that cannot be found out in seconds: the
    message says which.
    """
    check_lengths(lengths, cap)
    if len(lengths) < rows:
        raise PackingError(
            f"accumulation window: {len(lengths)} segments for {rows} rows; every micro-step needs one; lower "
            "training.effective_batch_size, or set custom.extra.rollout_matching.post_rollout_pack_scope: micro"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    sizes = [lengths[i] for i in order]
    placed = _emptiest_row(sizes, cap, rows)
    if placed is None:
        placed = _searched(lengths, sizes, cap, rows)
    packed = [sorted(order[k] for k in row) for row in _without_empty_rows(placed, rows)]
    return sorted(packed, key=lambda row: row[0])


def _searched(lengths: Sequence[int], sizes: list[int], cap: int, rows: int) -> list[list[int]]:
    """Return rows found by searching; raise PackingError when there are none, or when what is known does not say."""
    least = least_rows(sizes, cap)
    if least <= rows:
        try:
            return _complete(lengths, sizes, cap, rows, _FEW_STEPS)
        except _GaveUpError:
            fillings = Fillings(sizes, cap)
            least = fillings.least_rows(rows)
    if least > rows:
        raise _too_long(lengths, cap, rows, f"they need at least {least} rows")
    for first in range(_DIVES):
        if (placed := fillings.dive(rows, first=first)) is not None:
            return _members(placed, fillings.kinds, sizes)
    try:
        return _complete(lengths, sizes, cap, rows, _MANY_STEPS)
    except _GaveUpError:
        why = f"whether they fit is not known: the search was ended after {_MANY_STEPS} steps"
        raise _too_long(lengths, cap, rows, why) from None


def _complete(lengths: Sequence[int], sizes: list[int], cap: int, rows: int, steps: int) -> list[list[int]]:
    """Return rows by the complete search; raise PackingError when there are none, _GaveUpError after so many steps."""
    placed = _Search(cap, steps).rows([(size, k) for k, size in enumerate(sizes)], rows)
    if placed is None:
        raise _too_long(lengths, cap, rows, "no way of placing them fits")
    return placed


def _members(fillings: list[Filling], kinds: list[int], sizes: list[int]) -> list[list[int]]:
    """Return the positions of segments that rows filled in this way have."""
    waiting = {kind: [k for k, size in enumerate(sizes) if size == kind] for kind in kinds}
    return [
        [waiting[kind].pop() for kind, count in zip(kinds, filling, strict=True) for _ in range(count)]
        for filling in fillings
    ]


def _too_long(lengths: Sequence[int], cap: int, rows: int, why: str) -> PackingError:
    return PackingError(
        f"accumulation window: {len(lengths)} segments of {sum(lengths)} tokens in all (longest {max(lengths)}) for "
        f"{rows} rows of {cap}; {why}; raise global_max_length, lower custom.extra.rollout_matching.max_new_tokens or "
        "training.per_device_train_batch_size, or set custom.extra.rollout_matching.post_rollout_pack_scope: micro"
    )


def _emptiest_row(sizes: list[int], cap: int, rows: int) -> list[list[int]] | None:
    """Longest first onto the least loaded row; None when one does not fit."""
    loads, placed = [0] * rows, [[] for _ in range(rows)]  # type: tuple[list[int], list[list[int]]]
    for k, size in enumerate(sizes):
        row = loads.index(min(loads))
        if loads[row] + size > cap:
            return None
        loads[row] += size
        placed[row].append(k)
    return placed


class _Search:
    """Fills row after row: the longest segment left, with every set of others that leaves no more room than there is to
    spare.

    Complete: a row may always be taken as full as it gets (Martello and Toth's dominance), equal segments are
    interchangeable, and what has once been found not to fit is remembered by the lengths that were left.
    """

    def __init__(self, cap: int, steps: int) -> None:
        self._steps_left = steps
        self._cap = cap
        self._dead: set[tuple[int, ...]] = set()

    def rows(self, left: list[Segment], rows: int) -> list[list[int]] | None:
        """Return the rows for all segments that are left, longest first; None if there are none."""
        slack = rows * self._cap - sum(size for size, _ in left)
        if not left:
            return []
        state = tuple(size for size, _ in left)
        if slack < 0 or state in self._dead:
            return None
        for chosen in self._fillings(left, slack):
            rest = [one for k, one in enumerate(left) if k not in chosen]
            others = self.rows(rest, rows - 1)
            if others is not None:
                return [[left[k][1] for k in sorted(chosen)], *others]
        self._dead.add(state)
        return None

    def _fillings(self, left: list[Segment], slack: int) -> Iterator[frozenset[int]]:
        """Return the sets of positions in `left` for one row: the first, and others that leave at most `slack` room."""
        sizes = [size for size, _ in left]
        sums = _sums_from(sizes, self._cap)
        stack: list[tuple[int, int, tuple[int, ...]]] = [(1, self._cap - sizes[0], (0,))]
        while stack:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise _GaveUpError
            k, room, chosen = stack.pop()
            # Bit s of sums[k] says that segments k.. can make the sum s; one in room - slack .. room is needed.
            if not (sums[k] & ((2 << room) - 1)) >> max(room - slack, 0):
                continue
            if k == len(sizes):
                if not _still_fits(sizes, chosen, room):
                    yield frozenset(chosen)
                continue
            following = next((j for j in range(k + 1, len(sizes)) if sizes[j] != sizes[k]), len(sizes))
            stack.append((following, room, chosen))
            if sizes[k] <= room:
                stack.append((k + 1, room - sizes[k], (*chosen, k)))


class _GaveUpError(Exception):
    """The search grew too large."""


def _sums_from(sizes: list[int], cap: int) -> list[int]:
    """Return, for each position and the end, the sums <= cap that segments from there on can make, as bits."""
    sums, within = [1], (2 << cap) - 1
    for size in reversed(sizes):
        sums.append((sums[-1] | (sums[-1] << size)) & within)
    return sums[::-1]


def _still_fits(sizes: list[int], chosen: tuple[int, ...], room: int) -> bool:
    """Whether a segment that was left out fits into the room that remains."""
    taken = set(chosen)
    return any(size <= room and k not in taken for k, size in enumerate(sizes))


def _without_empty_rows(placed: list[list[int]], rows: int) -> list[list[int]]:
    """Fill empty rows with the shortest item of the row that has most."""
    filled = [row for row in placed if row]
    while len(filled) < rows:
        filled.append([max(filled, key=len).pop()])
    return filled
