"""Packing: how full rows get, and how long the choice takes, beside what else a trainer could do.

A buffer holds 512 segments; each row is chosen from it, and as many new segments as it took come in. Every algorithm
sees the same segments. `oldest first` takes segments in order as they fit; `first-fit decreasing` and `binpacking`
(constant volume, what ms-swift packs with) divide the whole buffer among rows, as does `best-fit decreasing`, TRL's
`bfd`; of their rows the fullest is taken, so nothing says when the oldest segment gets its turn. `oldest + binpacking`
puts the fullest bin beside the oldest segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import process_time

import numpy as np
from bench.tables import Row, Table, installed

from stage2_trainer.packing import PackingError, pack_window, select_segments

CAP = 16384
BUFFERED = 512
ROWS = 40
WINDOW = 32
WINDOWS = 20
SEEN = 8  # segments that a row of a window is made of at most, so that windows are not all but full

Choice = Callable[[Sequence[int], int], list[int]]


def lengths_of(kind: str, count: int, seed: int = 5) -> list[int]:
    """Lengths of segments: of photographs with a few objects (about 9.7 to a row), of dense ones, of both, or short."""
    random = np.random.default_rng(seed)
    sparse = np.clip(random.lognormal(7.1, 0.75, count), 200, 11000)
    dense = random.uniform(3000, 11000, count)
    mixed = np.where(random.random(count) < 0.7, sparse, dense)
    chosen = {"sparse": sparse, "dense": dense, "mixed": mixed, "short": random.uniform(200, 600, count)}[kind]
    return [int(length) for length in chosen]


def oldest_first(lengths: Sequence[int], cap: int) -> list[int]:
    """Segments in order, each that still fits."""
    chosen, total = [], 0
    for i, length in enumerate(lengths):
        if total + length <= cap:
            chosen.append(i)
            total += length
    return chosen


def first_fit_decreasing(lengths: Sequence[int], cap: int) -> list[int]:
    """Longest first, into the first row with room."""
    rows: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = next((k for k, (total, _) in enumerate(rows) if total + lengths[i] <= cap), len(rows))
        total, members = rows[at] if at < len(rows) else (0, [])
        rows[at : at + 1] = [(total + lengths[i], [*members, i])]
    return max(rows)[1]


def best_fit_decreasing(lengths: Sequence[int], cap: int) -> list[int]:
    """Longest first, into the row that it leaves least room in."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room and row, by room
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, (lengths[i], -1))
        room, row = rooms.pop(at) if at < len(rooms) else (cap, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(rooms, (room - lengths[i], row))
    return rows[rooms[0][1]]


def constant_volume(lengths: Sequence[int], cap: int) -> list[int]:
    """The fullest bin of the package `binpacking`."""
    bins = installed("binpacking").to_constant_volume(list(enumerate(lengths)), cap, weight_pos=1)
    return [i for i, _ in max(bins, key=lambda row: sum(length for _, length in row))]


def oldest_and_constant_volume(lengths: Sequence[int], cap: int) -> list[int]:
    """The oldest, and the fullest bin of the others for the room beside it."""
    room = cap - lengths[0]
    others = [(i, length) for i, length in enumerate(lengths) if i and length <= room]
    bins = installed("binpacking").to_constant_volume(others, room, weight_pos=1)
    best: Sequence[tuple[int, int]] = max(bins, key=lambda row: sum(length for _, length in row), default=[])
    return [0, *(i for i, _ in best)]


PEERS: dict[str, Choice] = {
    "oldest first": oldest_first,
    "first-fit decreasing": first_fit_decreasing,
    "best-fit decreasing (TRL)": best_fit_decreasing,
    "binpacking (ms-swift)": constant_volume,
    "oldest + binpacking": oldest_and_constant_volume,
}


def run(choose: Choice, kind: str) -> tuple[float, float]:
    """Mean fill of the rows, and median seconds of a choice, on a stream of segments of this kind."""
    stream = iter(lengths_of(kind, BUFFERED + ROWS * 80))
    waiting = [next(stream) for _ in range(BUFFERED)]
    fills, times = [], []
    for _ in range(ROWS):
        start = process_time()
        chosen = set(choose(waiting, CAP))
        times.append(process_time() - start)
        fills.append(sum(waiting[i] for i in chosen) / CAP)
        waiting = [length for i, length in enumerate(waiting) if i not in chosen]
        waiting += [next(stream) for _ in chosen]
    return sum(fills) / ROWS, median(times)


def row_choices() -> Iterator[Row]:
    """Ours against each peer, on each kind of segments."""
    for kind in ("sparse", "dense", "mixed", "short"):
        fill, ours = run(select_segments, kind)
        for name, choose in PEERS.items():
            if "binpacking" in name and installed("binpacking") is None:
                continue
            peer_fill, theirs = run(choose, kind)
            yield Row(f"{kind} segments", name, ours, theirs, f"fill {fill:.4f} against {peer_fill:.4f}")


def windows() -> Iterator[Row]:
    """A whole window that fits its rows: ours makes exactly as many rows, first-fit decreasing may need more.

    `tight`: the rows that it was cut from are all but full, so that counting and sorting do not get far.
    """
    for kind in ("sparse", "dense", "mixed", "tight"):
        times, peer_times, ours, theirs = [], [], 0, 0
        for seed in range(WINDOWS):
            lengths = cut_rows(seed) if kind == "tight" else fitting(kind, seed)
            start = process_time()
            ours += packed(lengths)
            times.append(process_time() - start)
            start = process_time()
            theirs += rows_of_first_fit(lengths, CAP) <= WINDOW
            peer_times.append(process_time() - start)
        found = f"{ours} against {theirs} of {WINDOWS} windows fit"
        yield Row(f"{kind} segments", "first-fit decreasing", median(times), median(peer_times), found)


def fitting(kind: str, seed: int) -> list[int]:
    """Segments that were taken from 32 rows, each filled in order as segments came, and mixed up."""
    waiting = lengths_of(kind, WINDOW * 40, seed)
    taken: list[int] = []
    for _ in range(WINDOW):
        row = set(oldest_first(waiting[:SEEN], CAP))
        taken += [waiting[i] for i in row]
        waiting = [length for i, length in enumerate(waiting) if i not in row]
    np.random.default_rng(seed).shuffle(taken)
    return taken


def packed(lengths: list[int]) -> bool:
    """Whether ours finds rows for a window."""
    try:
        pack_window(lengths, CAP, WINDOW)
    except PackingError:
        return False
    return True


def cut_rows(seed: int) -> list[int]:
    """Segments that rows with 2 % to spare were cut into, three or four each, and mixed up."""
    random = np.random.default_rng(seed)
    pieces: list[int] = []
    for _ in range(WINDOW):
        shares = random.dirichlet(np.full(random.integers(3, 5), 20.0))
        pieces += [int(share * CAP * 0.98) for share in shares]
    random.shuffle(pieces)
    return pieces


def rows_of_first_fit(lengths: Sequence[int], cap: int) -> int:
    """How many rows first-fit decreasing needs."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((k for k, total in enumerate(rows) if total + length <= cap), None)
        if at is None:
            rows.append(length)
        else:
            rows[at] += length
    return len(rows)


ROW_TABLE = Table(f"Packing: one row of {CAP} tokens out of {BUFFERED} segments", "ms", 1e3, row_choices)
WINDOW_TABLE = Table(f"Packing: a window of {WINDOW} rows of {CAP} tokens", "ms", 1e3, windows)
