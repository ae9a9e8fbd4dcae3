"""`stage2 prepare`: a stock model with coordinate tokens."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from stage2_api.errors import ConfigError, Problem
from stage2_cli.console import plain_console
from stage2_trainer.data.files import check_folder
from stage2_trainer.prepare.coordinate_tokens import STARTS, prepare


def prepare_model(model: str, output: Path, *, start: str) -> int:
    """Add the tokens, and print the result; return 0. Raises ConfigError."""
    chosen = next((one for one in STARTS if one == start), None)
    if chosen is None:
        raise ConfigError([Problem("--start", start, f"must be one of {', '.join(STARTS)}", "leave it out")])
    check_folder("--output", output)
    console = plain_console()
    with console.status(Text(f"preparing {model}")):
        result = prepare(model, output, start=chosen)
    head = "tied to the output head" if result.tied else "and an output head of the same length"
    console.print(
        f"{result.folder}: coordinate tokens {result.first_id} to {result.last_id}, {result.rows} embeddings, {head}."
        " Their rows are untrained: train stage 1 before stage 2"
    )
    return 0
