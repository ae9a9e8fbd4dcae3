"""Where the time of a sync goes, phase by phase, on the learner's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PHASES = ("connect", "begin", "pack", "send", "load", "finish", "prove")  # proofs are the synchronizer's


class SyncPhases:
    """Seconds of each phase of one sync.

    connect: forming groups. begin: stopping generation and opening the update. pack: merging and packing. send: waiting
    for bytes to go out. load: waiting for servers to load what has been sent. finish: closing the update. prove: the
    comparison of log-probabilities.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count the time of the block towards a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - start

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each phase so far."""
        return dict(self._seconds)
