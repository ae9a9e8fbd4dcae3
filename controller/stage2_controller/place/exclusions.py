"""Nodes that are out of a job's choice for a while: the scheduler refused it there for a reason not seen here. Pure."""

from collections import Counter
from collections.abc import Callable

from stage2_controller.spec.key import Key

EXCLUDED_S = 300.0
MOST_DOUBLINGS = 6  # five hours and a bit


class Exclusions:
    """The nodes that each job was refused, and until when.

    Each time for twice as long, so that every node of a large cluster gets its turn.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[tuple[Key, str], float] = {}
        self._refusals: Counter[tuple[Key, str]] = Counter()

    def add(self, key: Key, node: str) -> None:
        """Take the node out of the job's choice."""
        self._refusals[key, node] += 1
        pause_s = EXCLUDED_S * 2.0 ** min(self._refusals[key, node] - 1, MOST_DOUBLINGS)
        self._until[key, node] = self._clock() + pause_s

    def of(self, key: Key) -> list[str]:
        """Return the nodes that are out of the job's choice now."""
        return [node for job, node in self._until if job == key and self.holds(key, node)]

    def holds(self, key: Key, node: str) -> bool:
        """Return whether the node is out of the job's choice now."""
        return self._until.get((key, node), 0.0) > self._clock()

    def has_any(self, key: Key) -> bool:
        """Return whether the job was ever refused a node that is still known."""
        return any(job == key for job, _ in self._until)

    def jobs(self) -> set[Key]:
        """Return the jobs that were refused any."""
        return {job for job, _ in self._until}

    def forget_job(self, key: Key) -> None:
        """Drop what was refused to a job."""
        self._forget([pair for pair in self._until if pair[0] == key])

    def forget_node(self, node: str) -> None:
        """Drop what a node refused: another one of its name is another one."""
        self._forget([pair for pair in self._until if pair[1] == node])

    def _forget(self, pairs: list[tuple[Key, str]]) -> None:
        for pair in pairs:
            del self._until[pair], self._refusals[pair]
