"""A bound on the rows that segments need, by linear programming over fillings of a row (Gilmore and Gomory, 1961).

Segments have prices such that no row can hold more than one row's worth; then their worth is a lower bound on the rows,
which misses the truth in next to no case. Prices come from floating point; the bound that they give is computed again
in whole numbers, so that it holds whatever they are. Where it does not forbid the rows, the programme's own solution
says which fillings are worth taking: `dive` takes one after the other.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

Numbers = npt.NDArray[np.int64]
Filling = tuple[int, ...]  # how many segments of each kind a row holds

_WORTH = 10**7  # of one row, in whole prices
_ROUNDS = 300
_SURE = 1e-6


def least_rows(sizes: list[int], cap: int) -> int:
    """Return Martello and Toth's bound L2: items above cap - t stand alone, those above cap / 2 apart, for any t."""
    best = -(-sum(sizes) // cap)
    for t in sorted({size for size in sizes if size <= cap // 2}):
        alone = sum(size > cap - t for size in sizes)
        apart = [size for size in sizes if cap - t >= size > cap / 2]
        rest = sum(size for size in sizes if cap / 2 >= size >= t)
        spill = rest - (len(apart) * cap - sum(apart))
        best = max(best, alone + len(apart) + max(0, -(-spill // cap)))
    return max(best, sum(size > cap / 2 for size in sizes))


class Fillings:
    """Segments as kinds of one length each, and the fillings of a row of `cap` tokens that were found so far."""

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
