"""Raw accumulation windows, read one ahead of their turn, for rollouts that are asked for one window ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class WindowLookahead(Generic[T]):
    """A reader of raw windows that is one ahead of their turn."""

    def __init__(self) -> None:
        self._next: list[T] = []

    def take(self, read: Callable[[], list[T]]) -> tuple[list[T], list[T]]:
        """Return the next window and the one after it, which is empty at the end of an epoch."""
        window = self._next or read()
        self._next = read()
        return window, self._next
