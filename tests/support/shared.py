"""A costly thing that the processes of one run of pytest share: the first user creates it, the last one removes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

Value = TypeVar("Value")


@contextmanager
def shared(folder: Path, name: str, create: Callable[[], Value], remove: Callable[[Value], None]) -> Iterator[Value]:
    """Yield what `create` returned to the first user of `name`; `remove` gets it when the last user is done.

    folder: the same for all users. What `create` returns must be JSON. If it fails, the next user tries.
    """
    state, lock = folder / f"{name}.json", FileLock(folder / f"{name}.lock")
    with lock:
        users, value = json.loads(state.read_text()) if state.exists() else (0, None)
        if not users:
            value = create()
        state.write_text(json.dumps([users + 1, value]))
    try:
        yield value
    finally:
        with lock:
            users, value = json.loads(state.read_text())
            state.write_text(json.dumps([users - 1, value]))
            if users == 1:
                remove(value)
