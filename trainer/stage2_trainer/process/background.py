"""Calls that run beside the learner's own thread, and never keep the process alive.

Not a ThreadPoolExecutor: the interpreter waits for its threads at exit, here for a server that may never answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


def in_background(step: Callable[..., T], *arguments: Any, **options: Any) -> Future[T]:
    """Start `step(*arguments, **options)` in a daemon thread, and return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(step(*arguments, **options))
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"sync-{step.__qualname__}").start()
    return future


def all_at_once(step: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    """Run `step` on all items at once, and return what it returns, in their order; raises the first one's failure."""
    running = [in_background(step, item) for item in items]
    return [future.result() for future in running]
