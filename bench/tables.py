"""A benchmark's table in Markdown: one row for each comparison of ours with a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from time import process_time
from typing import Any, Protocol

RUNS = 7


class Lines(Protocol):
    """A table in Markdown, whatever its columns."""

    def lines(self) -> Iterator[str]:
        """The table's lines; each row is measured when it is read."""
        ...


@dataclass(frozen=True)
class Row:
    """One comparison: amounts (seconds or bytes) of ours and of the peer, and how far the results are apart."""

    what: str
    peer: str
    ours: float
    theirs: float
    difference: str = "–"


@dataclass(frozen=True)
class Table:
    """A title, the unit in which amounts are shown, how much of it one second or byte is, and the rows."""

    title: str
    unit: str
    per_unit: float
    rows: Callable[[], Iterator[Row]]

    def lines(self) -> Iterator[str]:
        """The table's lines; each row is measured when it is read."""
        yield f"\n## {self.title}\n\n"
        yield f"| what | peer | ours {self.unit} | peer {self.unit} | ratio | largest difference |\n"
        yield "| --- | --- | ---: | ---: | ---: | --- |\n"
        row = None
        for row in self.rows():
            amounts = f"{row.ours * self.per_unit:.2f} | {row.theirs * self.per_unit:.2f}"
            yield f"| {row.what} | {row.peer} | {amounts} | {row.theirs / row.ours:.2f} | {row.difference} |\n"
        if row is None:
            yield "| not measured: the peer is not installed | | | | | |\n"


def seconds(call: Callable[[], object]) -> float:
    """The least processor time of several runs, as many for each side: the one that was disturbed least."""
    times = []
    for _ in range(RUNS):
        start = process_time()
        call()
        times.append(process_time() - start)
    return min(times)


def installed(module: str) -> Any:
    """The module, or None where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        return None
