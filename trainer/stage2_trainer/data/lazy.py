"""A sequence that builds its items at each access, so that none stays in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence of `length` items; `build` returns the one at an index.

    >>> list(LazySequence(3, lambda index: index * index)[1:])
    [1, 4]
    """

    def __init__(self, length: int, build: Callable[[int], T]) -> None:
        self._length = length
        self._build = build

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._build(i) for i in range(*index.indices(self._length))]
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._build(index)
