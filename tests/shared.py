"""Something costly that the processes of one run of pytest share: the first that asks makes it, the last removes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

Made = TypeVar("Made")


@contextmanager
def shared(folder: Path, name: str, bring: Callable[[], Made], take: Callable[[Made], None]) -> Iterator[Made]:
    """Yield what `bring` returned to the first of all users of `name`; `take` gets it when the last one is done.

    folder: the same for all users. What `bring` returns must be JSON. A `bring` that fails is tried again by the next.
    """
    state, lock = folder / f"{name}.json", FileLock(folder / f"{name}.lock")
    with lock:
        users, made = json.loads(state.read_text()) if state.exists() else (0, None)
        if not users:
            made = bring()
        state.write_text(json.dumps([users + 1, made]))
    try:
        yield made
    finally:
        with lock:
            users, made = json.loads(state.read_text())
            state.write_text(json.dumps([users - 1, made]))
            if users == 1:
                take(made)
