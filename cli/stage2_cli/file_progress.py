"""How much of a data file has been read, on a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from stage2_trainer.data.records import Line


@contextmanager
def file_progress(path: Path, *, shown: bool = True) -> Iterator[Callable[[Line], None] | None]:
    """Yield a function that is told of each line; None where there is no terminal, or nothing to show."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal or not os.path.isfile(path):
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(path.name, total=path.stat().st_size)
        yield lambda line: progress.advance(task, len(line.text))
