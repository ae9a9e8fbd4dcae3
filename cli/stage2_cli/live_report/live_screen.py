"""A run's state as rich draws it. What comes from a log is plain text here, never rich's markup."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stage2_cli.live_report.live_run import FIGURES, SCORES, LiveRun

BAR = 30
_HEIGHTS = "▁▂▃▄▅▆▇█"


def screen(run: LiveRun, *, quiet_s: float | None) -> RenderableType:
    """Return the view of a run. quiet_s: seconds since its log grew."""
    return Panel(Group(*_rows(run, quiet_s)), title=Text(run.name, style="bold"), title_align="left", width=100)


def progress_line(run: LiveRun) -> str:
    """Return where a run is: step of steps, seconds of a step, time left."""
    of = "" if run.max_steps is None else f" of {run.max_steps}"
    seconds, left = run.step_seconds, run.seconds_left
    pace = "" if seconds is None else f", {seconds:.2f} s a step"
    rest = "" if left is None or run.phase == "ended" else f", {duration(left)} left"
    return f"{run.phase}, step {run.step}{of}{pace}{rest}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units.

    >>> duration(42), duration(125), duration(3 * 86400 + 7300)
    ('42 s', '2 min 5 s', '3 d 2 h')
    """
    rest, counts = int(seconds), []
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        counts.append((rest // size, name))
        rest %= size
    first = next((place for place, (count, _) in enumerate(counts) if count), 3)
    return " ".join(f"{count} {name}" for count, name in counts[first : first + 2])


def bar(share: float, width: int = BAR) -> str:
    """Return a share as a bar of text."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def _rows(run: LiveRun, quiet_s: float | None) -> Iterator[RenderableType]:
    if run.max_steps:
        yield Text(f"{bar(run.step / run.max_steps, 60)} {min(1.0, run.step / run.max_steps):.0%}")
    yield Text(progress_line(run), style="bold")
    quiet = "" if quiet_s is None else f", {duration(quiet_s)} ago"
    yield Text(f"last heard: {run.heard}{quiet}", style="dim")
    if run.made_of:
        yield Text(run.made_of, style="dim")
    yield from _loss(run)
    for table in (_scores(run), _times(run), _servers(run)):
        if table.row_count:
            yield Text()
            yield table
    if run.best:
        yield Text(f"\nbest checkpoint: {run.best}")
    if run.warnings:
        yield Text("\nlast warnings", style="bold")
        yield from (Text(one, style="yellow") for one in run.warnings)
    if run.ended:
        yield Text(f"\n{run.ended}", style="bold")


def _loss(run: LiveRun) -> Iterator[Text]:
    if run.loss is not None:
        yield Text(f"\nloss: {run.loss:.4g}  {_curve(list(run.losses))}")
    if run.figures:
        yield Text(", ".join(f"{FIGURES[key]}: {value:.4g}" for key, value in run.figures.items()))


def _curve(values: list[float]) -> str:
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(_HEIGHTS[round((one - low) / span * (len(_HEIGHTS) - 1))] for one in values)


def _scores(run: LiveRun) -> Table:
    table = _table(f"held-out, step {run.evaluated}", "last", "best", "at step")
    for key, score in run.scores.items():
        table.add_row(Text(SCORES[key]), f"{score.last:.3f}", f"{score.best:.3f}", str(score.best_step))
    return table


def _times(run: LiveRun) -> Table:
    table = _table("where the time goes", "share", "")
    for part, share in run.shares().items():
        table.add_row(part, f"{share:.0%}", bar(share))
    return table


def _servers(run: LiveRun) -> Table:
    table = _table("servers", "busy", "", "requests at once")
    for one in run.servers:
        table.add_row(Text(one.name), f"{one.busy:.0%}", bar(one.busy), f"{one.in_flight:.1f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, min_width=28, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table
