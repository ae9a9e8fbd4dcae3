"""What each test costs: its wall and processor seconds, one line of JSON each in the file that STAGE2_COSTS names.

    STAGE2_COSTS=costs.jsonl make test-unit
    python -m tests.support.costs costs.jsonl    a table of the files that cost most

Processor seconds are those of the process that runs the test and of all below it, the dead ones that were waited for
included. A process that dies without that takes its seconds along, so a test that ends one may cost too little, though
never less than nothing. Fixtures count for the test that is the first to ask for them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

FILE = "STAGE2_COSTS"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Append what a test costs to the file, where one is named."""
    path = os.environ.get(FILE)
    if path is None:
        return (yield)
    wall_s, cpu_s = time.monotonic(), cpu_seconds(psutil.Process())
    try:
        return (yield)
    finally:
        line = {
            "test": item.nodeid,
            "wall_s": round(time.monotonic() - wall_s, 2),
            "cpu_s": round(max(0.0, cpu_seconds(psutil.Process()) - cpu_s), 2),
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


def cpu_seconds(root: psutil.Process) -> float:
    """Return the processor seconds of a process and of all below it, the dead ones that were waited for included."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def table(lines: Iterable[str], most: int = 40) -> Iterator[str]:
    """Yield the lines of a Markdown table: the files that cost the most processor seconds, dearest first.

    >>> costs = ['{"test": "a.py::x", "wall_s": 3, "cpu_s": 2}', '{"test": "a.py::y", "wall_s": 1, "cpu_s": 1}']
    >>> list(table(costs))[2]
    '| `a.py` | 2 | 4 | 3 |'
    """
    files: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        cost = json.loads(line)
        files[cost["test"].partition("::")[0]].append((cost["wall_s"], cost["cpu_s"]))
    yield "| file | tests | wall seconds | CPU seconds |"
    yield "| --- | ---: | ---: | ---: |"
    for name, costs in sorted(files.items(), key=lambda file: -sum(cpu_s for _, cpu_s in file[1]))[:most]:
        yield f"| `{name}` | {len(costs)} | {sum(w for w, _ in costs):.0f} | {sum(c for _, c in costs):.0f} |"


if __name__ == "__main__":
    print(*table(Path(sys.argv[1]).read_text().splitlines()), sep="\n")
