"""How fast servers answer, and the division of requests by it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from stage2_trainer.rollouts.rollout_source import contiguous_chunks
from stage2_trainer.wire.requests import Rollout


class Speeds:
    """Tokens a second of one request, for each server, over the last calls.

    So a server that has more requests at once is not taken for a faster one. A server without a measurement counts as
    the mean of the others; without any, all chunks are equal.
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

    def chunks(self, n: int, servers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Split requests 0..n-1 into a half-open range [start, end) for each server, by its speed.

        >>> speeds = Speeds()
        >>> speeds._measured = {"fast": 30.0, "slow": 10.0}
        >>> speeds.chunks(10, ["fast", "new", "slow"])
        {'fast': (0, 5), 'new': (5, 8), 'slow': (8, 10)}
        """
        known = [self._measured[one] for one in servers if one in self._measured]
        if not known:
            return dict(zip(servers, contiguous_chunks(n, len(servers)), strict=True))
        mean = sum(known) / len(known)
        reached = list(itertools.accumulate(self._measured.get(one, mean) for one in servers))
        ends = [round(n * speed / reached[-1]) for speed in reached]
        return dict(zip(servers, itertools.pairwise([0, *ends]), strict=True))
