"""Output of all commands: configuration errors, plain text, and progress bars."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.text import Text

from stage2_api.errors import ConfigError, Problem, counted, shortened
from stage2_api.log_lines import one_line
from stage2_report.terminal import Terminal
from stage2_trainer.process.activity import ACTIVITY

if TYPE_CHECKING:
    from stage2_trainer.data.records import Line

Item = TypeVar("Item")

SHOWN = 100
"""Maximum number of problems to print for a file, which may have tens of thousands."""
LONGEST_VALUE = 400
KB = 1000


def show_config_error(error: ConfigError, *, source: str | None = None) -> None:
    """Print each problem to standard error: path, value, rule and fix."""
    console = Terminal(stderr=True)
    count = len(error.problems) + error.unlisted
    where = f"{source}: " if source else ""
    console.print(f"{where}{count} configuration error{'s' if count > 1 else ''}", style="bold red")
    _print_problems(console, error.problems, unlisted=error.unlisted)


def show_idle_settings(settings: Sequence[Problem]) -> None:
    """Print settings that are valid but do nothing in this run."""
    console = Terminal(stderr=True)
    if settings:
        console.print(f"  {len(settings)} without effect in this run", style="yellow")
    _print_problems(console, settings)


def show_warnings(warnings: Sequence[Problem]) -> None:
    """Print settings that are valid and may cost what the run has done."""
    console = Terminal(stderr=True)
    if warnings:
        console.print(f"  {counted(len(warnings), 'warning')}", style="yellow")
    _print_problems(console, warnings)


def _print_problems(console: Terminal, problems: Sequence[Problem], *, unlisted: int = 0) -> None:
    for problem in problems[:SHOWN]:
        value = "" if problem.value is None else f": {shortened(problem.value, LONGEST_VALUE)}"
        console.print(Text.assemble("  ", (one_line(problem.path), "bold"), value))
        console.print(f"    rule: {problem.rule}")
        console.print(f"    fix:  {problem.way_out}", style="green")
    if more := len(problems[SHOWN:]) + unlisted:
        console.print(f"  and {more} more")


def with_progress(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """Yield items, with a progress bar on a terminal; elsewhere the process's activity has their number."""
    console = Terminal(stderr=True, wraps=True)
    with ACTIVITY.doing("reading", total, what) as reading, _quiet(on=console.is_terminal):
        for item in track(items, what, total=total, console=console, transient=True, disable=not console.is_terminal):
            yield item
            reading.advance()


def _quiet(*, on: bool) -> AbstractContextManager[None]:
    """Report no activity while a progress bar shows it."""
    return ACTIVITY.reported(lambda line: None) if on else nullcontext()


@contextmanager
def file_progress(path: Path, *, shown: bool = True) -> Iterator[Callable[[Line], None] | None]:
    """Yield a callback for each line read: it moves a bar on a terminal if `shown`, else the process's activity."""
    console = Terminal(stderr=True, wraps=True)
    if not os.path.isfile(path):
        yield None
        return
    size, bar = path.stat().st_size, shown and console.is_terminal
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with (
        ACTIVITY.doing(f"reading {path}", size // KB, "kB") as reading,
        _quiet(on=bar),
        Progress(*columns, console=console, transient=True, disable=not bar) as progress,
    ):
        task, read = progress.add_task(path.name, total=size), 0

        def on_line(line: Line) -> None:
            nonlocal read
            read += len(line.text)
            reading.done = read // KB
            progress.advance(task, len(line.text))

        yield on_line
