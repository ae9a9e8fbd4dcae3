"""How fast servers answer, and the division of requests by it and by the lengths that answers are expected to have."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from stage2_trainer.rollouts.rollout_source import contiguous_chunks
from stage2_trainer.wire.requests import Rollout


class Speeds:
    """Tokens a second of one request, for each server, over the last calls.

    So a server that has more requests at once is not taken for a faster one. A server without a measurement counts as
    the mean of the others; without any, all are equally fast.
    """

    def __init__(self) -> None:
        self._measured: dict[str, float] = {}

    def measure(self, rollouts: Iterable[Rollout]) -> None:
        """Take in the answers of a call, which count as much as all calls before.

        A server that was asked nothing comes closer to the others, so that it is asked and measured again.
        """
        tokens: defaultdict[str, int] = defaultdict(int)
        seconds: defaultdict[str, float] = defaultdict(float)
        for one in rollouts:
            tokens[one.server] += len(one.token_ids)
            seconds[one.server] += one.seconds or 0.0
        for server, taken in seconds.items():
            if taken and tokens[server]:
                now = tokens[server] / taken
                self._measured[server] = (self._measured.get(server, now) + now) / 2
        asked = [speed for server, speed in self._measured.items() if server in seconds]
        for server in self._measured.keys() - seconds.keys() if asked else ():
            self._measured[server] = (self._measured[server] + sum(asked) / len(asked)) / 2

    def divide(
        self, indices: Sequence[int], servers: Sequence[str], expected: Sequence[int] = ()
    ) -> dict[str, Sequence[int]]:
        """Return the requests of each server, in the order in which it gets them.

        The longest comes first, and each goes to the server that would have answered it first. Where all are expected
        to be equally long, each server has a contiguous chunk.

        expected: the length of the answer to each request, by its index and in any unit; empty = unknown.

        >>> speeds = Speeds()
        >>> speeds._measured = {"fast": 30.0, "slow": 10.0}
        >>> speeds.divide(range(10), ["fast", "new", "slow"])
        {'fast': range(0, 5), 'new': range(5, 8), 'slow': range(8, 10)}
        >>> speeds.divide(range(5), ["fast", "slow"], expected=[2, 1, 9, 1, 3])
        {'fast': [2, 0, 1], 'slow': [4, 3]}
        """
        if len({expected[index] for index in indices} if expected else ()) < 2:
            return {one: indices[start:end] for one, (start, end) in self._chunks(len(indices), servers).items()}
        speeds, ends = np.array(self._known(servers) or [1.0] * len(servers)), np.zeros(len(servers))
        shares: list[list[int]] = [[] for _ in servers]
        for index in sorted(indices, key=lambda index: -expected[index]):
            answered = ends + expected[index] / speeds
            first = int(answered.argmin())
            ends[first] = answered[first]
            shares[first].append(index)
        return dict(zip(servers, shares, strict=True))

    def _chunks(self, n: int, servers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Split requests 0..n-1 into a half-open range [start, end) for each server, by its speed."""
        speeds = self._known(servers)
        if not speeds:
            return dict(zip(servers, contiguous_chunks(n, len(servers)), strict=True))
        reached = list(itertools.accumulate(speeds))
        ends = [round(n * speed / reached[-1]) for speed in reached]
        return dict(zip(servers, itertools.pairwise([0, *ends]), strict=True))

    def _known(self, servers: Sequence[str]) -> list[float]:
        """Return the speed of each of these servers; none if none of them was measured."""
        known = [self._measured[one] for one in servers if one in self._measured]
        return [self._measured.get(one, sum(known) / len(known)) for one in servers] if known else []
