"""Locks between commands that run at the same time; a lock goes with its holder, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from local_cluster.layout import Layout


@contextmanager
def held(layout: Layout, what: str) -> Iterator[None]:
    """Wait for, and hold, the lock of one kind of work: `boot`, `build` or `load`."""
    layout.cache.mkdir(parents=True, exist_ok=True)
    with (layout.cache / f"{what}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
