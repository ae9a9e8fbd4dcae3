"""All segments of an accumulation window in exactly as many rows as it has micro-steps, or a proof that none fit.

Longest first onto the emptiest row nearly always fits and balances the rows. Where it does not, a bound, a complete
search of few steps, linear programming over fillings of a row (Gilmore and Gomory, 1961) and a complete search of many
steps follow, until one of them decides. Source: semantics, section 8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from stage2_trainer.packing.rows import PackingError, check_lengths

Segment = tuple[int, int]  # length, position in the order of falling length
Numbers = npt.NDArray[np.int64]
Filling = tuple[int, ...]  # how many segments of each kind a row holds

_FEW_STEPS = 20_000
_MANY_STEPS = 500_000
_DIVES = 4
_WORTH = 10**7  # of one row, in whole prices
_ROUNDS = 300
_SURE = 1e-6


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


def _without_empty_rows(placed: list[list[int]], rows: int) -> list[list[int]]:
    """Fill empty rows with the shortest item of the row that has most."""
    filled = [row for row in placed if row]
    while len(filled) < rows:
        filled.append([max(filled, key=len).pop()])
    return filled


def least_rows(sizes: list[int], cap: int) -> int:
    """Return Martello and Toth's bound L2: items above cap - t stand alone, those above cap / 2 apart, for any t."""
    best = sum(size > cap / 2 for size in sizes)
    for t in sorted({size for size in sizes if size <= cap // 2}):
        alone = sum(size > cap - t for size in sizes)
        apart = [size for size in sizes if cap - t >= size > cap / 2]
        rest = sum(size for size in sizes if cap / 2 >= size >= t)
        spill = rest - (len(apart) * cap - sum(apart))
        best = max(best, alone + len(apart) + max(0, -(-spill // cap)))
    return best


class Fillings:
    """Segments as kinds of one length each, and the fillings of a row of `cap` tokens that were found so far.

    Segments get prices such that no row holds more than one row's worth; their worth is a lower bound on the rows, and
    nearly always exact. Prices are floating point, the bound is computed again in whole numbers, so it always holds.
    Where it does not forbid the rows, the programme's solution says which fillings are worth taking: see `dive`.
    """

    def __init__(self, sizes: list[int], cap: int) -> None:
        counted = Counter(sizes)
        self.kinds = sorted(counted, reverse=True)
        self.counts = np.array([counted[kind] for kind in self.kinds], dtype=np.int64)
        self._cap = cap
        self._found: dict[Filling, None] = {}

    def least_rows(self, rows: int) -> int:
        """Return a lower bound on the rows; a better one than needed is not looked for."""
        return self._solved(self.counts, rows)[0]

    def dive(self, rows: int, *, first: int = 0) -> list[Filling] | None:
        """Return at most `rows` fillings that hold every segment; None when this way leads to none.

        The first filling is the one with the greatest share but `first`: other ways begin elsewhere.
        """
        left = self.counts.copy()
        taken: list[Filling] = []
        while left.any():
            least, fillings, shares = self._solved(left, rows - len(taken))
            if least > rows - len(taken) or not len(shares):
                return None
            by_share = np.argsort(-shares, kind="stable")
            chosen = fillings[by_share[0 if taken else min(first, len(by_share) - 1)]]
            taken.append(tuple(map(int, chosen)))
            left -= chosen
        return taken

    def _solved(self, counts: Numbers, rows: int) -> tuple[int, Numbers, npt.NDArray[np.float64]]:
        """Return a lower bound on the rows for so many of each kind, fillings, and the share of each in a solution.

        Done when the bound is above `rows`, or a solution needs no more of them, or is the best; the shares are empty
        when there are none.
        """
        least = 0
        alone = np.diag(np.minimum(counts, self._cap // np.array(self.kinds)))
        known = [filling for filling in self._found if (np.array(filling) <= counts).all()]
        fillings = np.array([*map(tuple, alone[counts > 0].tolist()), *known], dtype=np.int64)
        for _ in range(_ROUNDS):
            solved = linprog(-counts, A_ub=fillings, b_ub=np.ones(len(fillings)), bounds=(0, None), method="highs")
            shares = -np.asarray(solved.ineqlin.marginals)
            if float(shares.sum()) <= rows + _SURE:
                return least, fillings, shares
            prices = np.floor(np.maximum(np.asarray(solved.x), 0) * _WORTH).astype(np.int64)
            worth, filling = self._dearest(counts, prices)
            least = max(least, -int(-(counts @ prices) // worth))
            if least > rows or worth <= _WORTH * (1 + _SURE):
                return least, fillings, np.empty(0)
            self._found[tuple(map(int, filling))] = None
            fillings = np.vstack([fillings, filling])
        return least, fillings, np.empty(0)

    def _dearest(self, counts: Numbers, prices: Numbers) -> tuple[int, Numbers]:
        """Return the greatest worth that a filling of one row has, and that filling."""
        cap = self._cap
        worth: Numbers = np.zeros(cap + 1, dtype=np.int64)  # of the best filling with at most so many tokens
        items = [
            (k, kind)
            for k, kind in enumerate(self.kinds)
            for _ in range(min(counts[k], cap // kind) if prices[k] > 0 else 0)
        ]
        taken = np.zeros((len(items), cap + 1), dtype=bool)
        for row, (k, kind) in zip(taken, items, strict=True):
            with_it = worth[: cap + 1 - kind] + prices[k]
            np.greater(with_it, worth[kind:], out=row[kind:])
            np.maximum(worth[kind:], with_it, out=worth[kind:])
        filling: Numbers = np.zeros(len(self.kinds), dtype=np.int64)
        left = cap
        for row, (k, kind) in zip(taken[::-1], items[::-1], strict=True):
            if row[left]:
                filling[k] += 1
                left -= kind
        return int(worth[cap]), filling


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
