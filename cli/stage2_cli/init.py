"""`stage2 prepare`: a stock model with coordinate tokens; `stage2 init`: a project folder for both training stages."""

from __future__ import annotations

import shlex
from pathlib import Path

from stage2_cli.console import with_progress
from stage2_cli.steps import check_same, run_undone, with_records
from stage2_report.terminal import Terminal
from stage2_trainer.data.files import check_folder
from stage2_trainer.prepare.project_request import ProjectRequest, check_request
from stage2_trainer.prepare.stock_model import source_of
from stage2_trainer.process.activity import ACTIVITY, LIBRARIES


def prepare_model(model: str, output: Path) -> int:
    """Add the tokens, and print the result; return 0. Raises ConfigError."""
    check_folder("--output", output)
    source_of(model)
    with ACTIVITY.doing(LIBRARIES):
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


def init_project(request: ProjectRequest, units: str | None = None) -> int:
    """Create the folder, and print its contents and the next commands; return 0. Raises ConfigError.

    Annotations are imported first, by a command that is printed; if it fails, its exit code is returned. What it has
    written stays if a later check fails: the corrected line, or `stage2 train`, goes on from there. units: of the
    annotations' coordinates.
    """
    step, records = with_records(request, units)
    check_request(request, imported=step is not None)
    if step is not None:
        check_same(request, units, records.data)
        if code := run_undone(step):
            return code
    request = records
    with ACTIVITY.doing(LIBRARIES):
        from stage2_trainer.prepare.project_folder import create_project

    with ACTIVITY.doing(f"creating {request.output}"):
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
