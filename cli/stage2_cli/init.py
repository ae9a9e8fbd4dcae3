"""`stage2 prepare`: a stock model with coordinate tokens; `stage2 init`: a project folder for both training stages."""

from __future__ import annotations

import shlex
from pathlib import Path

from stage2_cli.console import with_progress
from stage2_cli.steps import run_step, with_records
from stage2_report.terminal import Terminal
from stage2_trainer.data.files import check_folder
from stage2_trainer.prepare.project_request import ProjectRequest, check_request
from stage2_trainer.prepare.stock_model import source_of
from stage2_trainer.process.activity import ACTIVITY


def prepare_model(model: str, output: Path) -> int:
    """Add the tokens, and print the result; return 0. Raises ConfigError."""
    check_folder("--output", output)
    source_of(model)
    from stage2_trainer.prepare.coordinate_tokens import prepare

    console = Terminal()
    with ACTIVITY.doing(f"adding coordinate tokens to {model}"):
        result = prepare(model, output)
    head = "tied to the output head" if result.tied else "and an output head of the same length"
    console.print(
        f"{result.folder}: coordinate tokens {result.first_id} to {result.last_id}, {result.rows} embeddings, {head}."
        " Their rows are untrained: train stage 1 before stage 2"
    )
    return 0


def init_project(request: ProjectRequest) -> int:
    """Create the folder, and print its contents and the next commands; return 0. Raises ConfigError.

    Annotations are imported first, by a command that is printed; if it fails, its exit code is returned.
    """
    step, records = with_records(request)
    check_request(request, imported=step is not None)
    if step is not None:
        Terminal().print(f"$ {step.line}", style="bold")
        if code := run_step(step):
            return code
    request = records
    from stage2_trainer.prepare.project_folder import create_project

    project = create_project(request, with_progress)
    console = Terminal()
    lengths = project.measures
    console.print(f"records: {lengths.records:,} to train on, {lengths.held_out:,} held out")
    console.print(
        f"answers: up to {lengths.objects:,} objects and {lengths.longest_answer:,} tokens, on average"
        f" {lengths.mean_answer:,.0f}"
    )
    console.print(f"model: {project.folders.model}")
    console.print(f"next: cd {shlex.quote(str(request.output))} and the commands of its README.md")
    return 0
