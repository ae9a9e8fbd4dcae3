"""Configuration errors as the `stage2` command shows them: every problem, on standard error, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from stage2_api.errors import ConfigError, Problem, shortened

SHOWN = 100
"""Problems of one file that are printed; a file that is none of ours may have tens of thousands."""
LONGEST_VALUE = 400


def show_config_error(error: ConfigError, *, source: str | None = None) -> None:
    """Print each problem as path, value found, rule and way out."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    count = len(error.problems) + error.unlisted
    where = f"{source}: " if source else ""
    console.print(Text(f"{where}{count} configuration error{'s' if count > 1 else ''}", style="bold red"))
    _print_problems(console, error.problems, unlisted=error.unlisted)


def show_idle_settings(settings: Sequence[Problem]) -> None:
    """Print settings that are valid but do nothing in this run."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if settings:
        console.print(Text(f"  {len(settings)} without effect in this run", style="yellow"))
    _print_problems(console, settings)


def _print_problems(console: Console, problems: Sequence[Problem], *, unlisted: int = 0) -> None:
    for problem in problems[:SHOWN]:
        value = "None" if problem.value is None else shortened(problem.value, LONGEST_VALUE)
        console.print(Text.assemble("  ", (problem.path, "bold"), f": {value}"))
        console.print(Text(f"    rule:    {problem.rule}"))
        console.print(Text(f"    way out: {problem.way_out}", style="green"))
    if more := len(problems[SHOWN:]) + unlisted:
        console.print(Text(f"  and {more} more"))
