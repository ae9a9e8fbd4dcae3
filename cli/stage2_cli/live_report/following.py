"""`stage2 report RUN --live`: the log is read as it grows, until the run has ended or somebody presses Ctrl-C."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stage2_api.errors import ConfigError, Problem
from stage2_cli.live_report.live_run import LiveRun, readable
from stage2_cli.live_report.live_screen import progress_line, screen
from stage2_cli.log_tail import LogTail
from stage2_trainer.telemetry.run_log import STEP_LOG

REFRESH_S = 1.0


def follow_run(
    source: Path,
    *,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> None:
    """Show a run until it has ended: as a view that is drawn anew on a terminal, as lines elsewhere.

    source: the run's folder, which may have no log yet, or its log. Raises ConfigError where there is neither.
    """
    following = _Following(source, now)
    console = console or Console(highlight=False, soft_wrap=False)
    try:
        if console.is_terminal and not console.is_dumb_terminal:
            _draw(following, console, sleep)
        else:
            _print(following, console, sleep)
    except KeyboardInterrupt:
        console.print(Text(f"left: {progress_line(following.run)}"), soft_wrap=True)


def followed_run(runs: Sequence[Path], **others: object) -> Path:
    """Return the run that is followed. Raises ConfigError where there are several, or other options that show it."""
    told = {f"--{name}": value for name, value in others.items() if value is not None}
    if len(runs) > 1:
        told["RUN"] = f"{len(runs)} runs"
    if told:
        rule, way_out = "--live shows one run, and nothing else", "leave it out, or --live"
        raise ConfigError([Problem(option, str(value), rule, way_out) for option, value in told.items()])
    return runs[0]


class _Following:
    """A run's state, and the place in its log up to which it was taken."""

    def __init__(self, source: Path, now: Callable[[], float]) -> None:
        if not (os.path.isdir(source) or os.path.isfile(source)):
            rule, way_out = "must be a run's output folder, or its log", "give training.output_dir of the run"
            raise ConfigError([Problem("RUN", str(source), rule, way_out)])
        self._tail = LogTail(source / STEP_LOG if os.path.isdir(source) else source)
        self._now = now
        self._begun = 0
        self.run = self._new()

    def news(self) -> Iterator[str]:
        """Take what the log has more than the last time; yield what it says."""
        for line in self._tail.new_lines():
            if self._begun != self._tail.times_begun:  # `--overwrite`: another run, in the same place
                self._begun, self.run = self._tail.times_begun, self._new()
            if said := self.run.note(line):
                yield said

    @property
    def quiet_s(self) -> float | None:
        """Seconds since the log grew; None where there is none."""
        try:
            return max(0.0, self._now() - self._tail.path.stat().st_mtime)
        except FileNotFoundError:
            return None

    def _new(self) -> LiveRun:
        log = self._tail.path.resolve()
        return LiveRun(readable(log.parent.name if log.name == STEP_LOG else log.name))


def _draw(following: _Following, console: Console, sleep: Callable[[float], None]) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while not following.run.ended:
            for _ in following.news():
                pass
            live.update(screen(following.run, quiet_s=following.quiet_s), refresh=True)
            if not following.run.ended:
                sleep(REFRESH_S)


def _print(following: _Following, console: Console, sleep: Callable[[float], None]) -> None:
    """Print where the run is, and from then on what it says."""
    for _ in following.news():
        pass
    run = following.run
    console.print(Text(f"{run.name}: {progress_line(run)}"), soft_wrap=True)
    for said in (*run.warnings, run.ended):
        if said:
            console.print(Text(said), soft_wrap=True)
    while not following.run.ended:
        sleep(REFRESH_S)
        for said in following.news():
            console.print(Text(said), soft_wrap=True)
