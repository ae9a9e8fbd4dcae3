"""All segments of an accumulation window in exactly as many rows as it has micro-steps, if a search finds such rows.

Longest first onto the emptiest row nearly always fits. Rows that are too full then share their segments with others,
two rows at a time. Where that does not help, a lower bound or a complete search with a limit on its steps decides.
Source: semantics, section 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stage2_trainer.packing.rows import PackingError, check_lengths

Segment = tuple[int, int]  # length, position in the order of falling length
_STEPS = 500_000  # of the complete search: some seconds at most


def pack_window(lengths: Sequence[int], cap: int, rows: int) -> list[list[int]]:
    """Partition the segments into exactly `rows` rows, none empty, none longer than `cap` tokens.

    Returns each row's indices (rising), rows ordered by their first segment. Deterministic. PackingError when no
    partition exists, or, for some windows that are nearly full, when some seconds of search find none: the message says
    which.
    """
    check_lengths(lengths, cap)
    if len(lengths) < rows:
        raise PackingError(
            f"accumulation window: {len(lengths)} segments for {rows} rows; every micro-step needs one; lower "
            "training.effective_batch_size, or set custom.extra.rollout_matching.post_rollout_pack_scope: micro"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    sizes = [lengths[i] for i in order]
    placed = _balanced(sizes, cap, rows)
    if placed is None:
        placed = _searched(lengths, sizes, cap, rows)
    packed = [sorted(order[k] for k in row) for row in _without_empty_rows(placed, rows)]
    return sorted(packed, key=lambda row: row[0])


def _searched(lengths: Sequence[int], sizes: list[int], cap: int, rows: int) -> list[list[int]]:
    """Return rows by the complete search; raise PackingError if there are none, or if the search does not end."""
    least = least_rows(sizes, cap)
    if least > rows:
        raise _too_long(lengths, cap, rows, f"they need at least {least} rows")
    try:
        placed = _Search(cap, _STEPS).rows([(size, k) for k, size in enumerate(sizes)], rows)
    except _GaveUpError:
        why = f"whether they fit is not known: the search was ended after {_STEPS} steps"
        raise _too_long(lengths, cap, rows, why) from None
    if placed is None:
        raise _too_long(lengths, cap, rows, "no way of placing them fits")
    return placed


def _too_long(lengths: Sequence[int], cap: int, rows: int, why: str) -> PackingError:
    return PackingError(
        f"accumulation window: {len(lengths)} segments of {sum(lengths)} tokens in all (longest {max(lengths)}) for "
        f"{rows} rows of {cap}; {why}; raise global_max_length, lower custom.extra.rollout_matching.max_new_tokens or "
        "training.per_device_train_batch_size, or set custom.extra.rollout_matching.post_rollout_pack_scope: micro"
    )


def _balanced(sizes: list[int], cap: int, rows: int) -> list[list[int]] | None:
    """Place each segment, longest first, in the emptiest row; then redistribute the fullest row and another one.

    The other is the emptiest row with which the division helps. None if the fullest row stays too full.
    """
    loads, placed = [0] * rows, [[] for _ in range(rows)]  # type: tuple[list[int], list[list[int]]]
    for k, size in enumerate(sizes):
        row = loads.index(min(loads))
        loads[row] += size
        placed[row].append(k)
    while max(loads) > cap:
        fullest = loads.index(max(loads))
        for row in sorted(range(rows), key=loads.__getitem__):
            halves = _halved(sorted(placed[fullest] + placed[row]), sizes)
            totals = [sum(sizes[k] for k in half) for half in halves]
            if max(totals) < loads[fullest]:
                placed[fullest], placed[row] = halves
                loads[fullest], loads[row] = totals
                break
        else:
            return None
    return placed


def _halved(segments: list[int], sizes: list[int]) -> tuple[list[int], list[int]]:
    """Divide segments into two parts whose lengths differ least."""
    half = sum(sizes[k] for k in segments) // 2
    sums = _sums_from([sizes[k] for k in segments], half)
    room = sums[0].bit_length() - 1
    chosen = []
    for k, later in zip(segments, sums[1:], strict=True):
        if sizes[k] <= room and later >> (room - sizes[k]) & 1:
            chosen.append(k)
            room -= sizes[k]
    return [k for k in segments if k not in chosen], chosen


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
