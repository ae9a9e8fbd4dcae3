"""All segments of an accumulation window in exactly as many rows as it has micro-steps, or a proof that they do not
fit.

Longest first onto the emptiest row nearly always fits and balances the rows. Where it does not, a complete search
decides. Source: semantics, section 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stage2_trainer.learner.packing_errors import PackingError, check_lengths

Segment = tuple[int, int]  # length, position in the order of falling length

_MOST_STEPS = 2_000_000


def pack_window(lengths: Sequence[int], cap: int, rows: int) -> list[list[int]]:
    """Partition the segments into exactly `rows` rows, none empty, none longer than `cap` tokens.

    Returns each row's indices (rising), rows ordered by their first segment. Deterministic. PackingError when no
    partition exists, or, for windows filled to the last few tokens, when the search for one grows beyond all reason.
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
    """Rows found by the complete search; PackingError when there are none."""
    least = _least_rows(sizes, cap)
    if least > rows:
        raise _too_long(lengths, cap, rows, f"they need at least {least} rows")
    try:
        placed = _Search(cap).rows([(size, k) for k, size in enumerate(sizes)], rows)
    except _GaveUpError:
        raise _too_long(lengths, cap, rows, f"no way of placing them was found in {_MOST_STEPS} steps") from None
    if placed is None:
        raise _too_long(lengths, cap, rows, "no way of placing them fits")
    return placed


def _too_long(lengths: Sequence[int], cap: int, rows: int, why: str) -> PackingError:
    return PackingError(
        f"accumulation window: {len(lengths)} segments of {sum(lengths)} tokens in all (longest {max(lengths)}) for "
        f"{rows} rows of {cap}; {why}; raise global_max_length, lower custom.extra.rollout_matching.max_new_tokens or "
        "training.per_device_train_batch_size, or set custom.extra.rollout_matching.post_rollout_pack_scope: micro"
    )


def _least_rows(sizes: list[int], cap: int) -> int:
    """Lower bound on the rows (Martello and Toth's L2): items above cap - t stand alone, those above cap / 2 apart."""
    best = -(-sum(sizes) // cap)
    for t in sorted({size for size in sizes if size <= cap // 2}):
        alone = sum(size > cap - t for size in sizes)
        apart = [size for size in sizes if cap - t >= size > cap / 2]
        rest = sum(size for size in sizes if cap / 2 >= size >= t)
        spill = rest - (len(apart) * cap - sum(apart))
        best = max(best, alone + len(apart) + max(0, -(-spill // cap)))
    return max(best, sum(size > cap / 2 for size in sizes))


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

    def __init__(self, cap: int) -> None:
        self.steps = 0
        self._cap = cap
        self._dead: set[tuple[int, ...]] = set()

    def rows(self, left: list[Segment], rows: int) -> list[list[int]] | None:
        """Rows for all segments that are left, longest first; None if there are none."""
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
        """Sets of positions in `left` for one row: the first, and others that leave at most `slack` room."""
        sizes = [size for size, _ in left]
        sums = _sums_from(sizes, self._cap)
        stack: list[tuple[int, int, tuple[int, ...]]] = [(1, self._cap - sizes[0], (0,))]
        while stack:
            self.steps += 1
            if self.steps > _MOST_STEPS:
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
    """For each position, and the end, the sums <= cap that the segments from there on can make, as bits."""
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
