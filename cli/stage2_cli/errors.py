"""How the `stage2` command shows configuration errors: every problem, on standard error, for people."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from stage2_api.errors import ConfigError


def show_config_error(error: ConfigError, *, source: str | None = None) -> None:
    """Print each problem as path, value found, rule and way out."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    count = len(error.problems)
    where = f"{source}: " if source else ""
    console.print(Text(f"{where}{count} configuration error{'s' if count > 1 else ''}", style="bold red"))
    for problem in error.problems:
        console.print(Text.assemble("  ", (problem.path, "bold"), f": {problem.value!r}"))
        console.print(Text(f"    rule:    {problem.rule}"))
        console.print(Text(f"    way out: {problem.way_out}", style="green"))
