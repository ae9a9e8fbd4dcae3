"""One NCCL group of the learner and the workers of all its servers: what all are sent leaves the learner once.

Each server keeps its own port, its own links and its own call; only NCCL's communicator is shared, and ranks go on from
one server to the next. All must be sent the same, so it is for full training. A member that breaks ends it for all, and
for good: a server that stands still may cost the others one deadline, and from then on each has a group of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from stage2_trainer.sync.transports.link import Link, abort_all
from stage2_trainer.sync.transports.nccl_group import Communicator, NcclGroup
from stage2_trainer.sync.transports.protocol import Packed
from stage2_trainer.sync.transports.transfer_group import LEARNER_RANK
from stage2_trainer.wire.errors import LinkError

WAS_LEFT = "the group of all servers was left"


@dataclass
class Broadcast:
    """A bucket on its way to all. awaited: the servers whose turn to send it has not come yet."""

    packed: Packed
    awaited: int
    done: Future[None] = field(default_factory=Future)


class OneGroup:
    """The group of so many servers. Each has a seat, by number, and a thread that calls for it.

    communicator: makes what the group speaks with. timeout_s: seconds that forming it, or sending a bucket, may take.
    """

    def __init__(self, servers: int, *, communicator: Callable[[], Communicator], timeout_s: float) -> None:
        self._servers = servers
        self._communicator = communicator
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._workers: dict[int, int] = {}
        self._links: dict[int, Sequence[Link]] = {}
        self._group: NcclGroup | None = None
        self._sending: dict[int, Broadcast] = {}
        self._over = False

    @property
    def over(self) -> bool:
        """Whether each server is on its own."""
        return self._over

    def place(self, seat: int, workers: int) -> tuple[int, int]:
        """Return the rank of a server's first worker, and how many members there are; waits for the other servers.

        Raises:
            LinkError: one of them did not come in time, or the group was left.
        """
        with self._changed:
            self._workers[seat] = workers
            self._changed.notify_all()
            self._wait_until(lambda: len(self._workers) == self._servers)
            before = sum(count for other, count in self._workers.items() if other < seat)
            return LEARNER_RANK + 1 + before, 1 + sum(self._workers.values())

    def enter(self, seat: int, links: Sequence[Link]) -> None:
        """Form the group as soon as the links to the workers of all servers are there; returns once it is.

        Raises:
            LinkError: it was not formed.
        """
        with self._changed:
            self._links[seat] = links
            last = len(self._links) == self._servers and not self._over
        if last:
            self._open()
        with self._changed:
            self._wait_until(lambda: self._group is not None)

    def send(self, packed: Packed) -> bool:
        """Send a bucket to all, once, and return whether this call did it. Each server's thread calls, and waits.

        Raises:
            LinkError: it was not taken by all, and the group is of no use any more.
        """
        with self._changed:
            group = self._group
            if self._over or group is None:
                raise LinkError(WAS_LEFT)
            broadcast = self._sending.get(id(packed))
            first = broadcast is None
            if broadcast is None:
                broadcast = self._sending[id(packed)] = Broadcast(packed, self._servers)
            broadcast.awaited -= 1
            if not broadcast.awaited:
                del self._sending[id(packed)]
        if first:
            _run(group, broadcast)
        broadcast.done.result()
        return first

    def part(self) -> None:
        """End the group: all waits in it fail, here and at the servers."""
        with self._changed:
            if self._over:
                return
            self._over = True
            self._sending.clear()
            links = [link for of_server in self._links.values() for link in of_server]
            group, self._group = self._group, None
            self._changed.notify_all()
        abort_all(links)
        if group is not None:
            group.close()

    def _open(self) -> None:
        links = [link for _, of_server in sorted(self._links.items()) for link in of_server]
        communicator = self._communicator()
        group = NcclGroup(communicator, links, self._timeout_s)
        try:
            unique_id = communicator.new_unique_id()
            for link in links:
                link.send([unique_id], self._timeout_s)
            group.open(unique_id, LEARNER_RANK, 1 + len(links))
        except BaseException:
            self.part()
            group.close()
            raise
        with self._changed:
            if not self._over:
                self._group = group
                self._changed.notify_all()
                return
        group.close()  # somebody has waited too long meanwhile
        raise LinkError(WAS_LEFT)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._over or is_so(), self._timeout_s)
        if self._over or not is_so():
            raise LinkError(WAS_LEFT if self._over else f"not all servers came within {self._timeout_s:g} s")


def _run(group: NcclGroup, broadcast: Broadcast) -> None:
    try:
        for part in broadcast.packed.parts:
            group.broadcast(part, broadcast.packed.ready)
    except Exception as error:  # noqa: BLE001  # it is raised to each server's thread
        broadcast.done.set_exception(error)
    else:
        broadcast.done.set_result(None)
