"""`stage2 init`: a folder from which both stages are trained, made of annotations and a stock model."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from stage2_api.errors import ConfigError, Problem
from stage2_cli.importing import say_tally
from stage2_cli.plain_console import plain_console
from stage2_trainer.prepare.project.folder import Annotations, MadeProject, ProjectRequest, make_project


def init_project(request: ProjectRequest) -> int:
    """Make the folder, and say what it holds and what to type next; 0. Raises ConfigError."""
    made = make_project(request, _shown)
    console = plain_console()
    say_tally(made.train, made.folders.train)
    say_tally(made.held_out, made.folders.held_out)
    for line in _said(made):
        console.print(line)
    console.print(f"then: cd {shlex.quote(str(request.output))} and the commands of its README.md")
    return 0


def chosen_annotations(
    coco: Path, images: Path, val_coco: Path | None, val_images: Path | None
) -> tuple[Annotations, Annotations | None]:
    """Return the annotations to train on and those that are held out. Raises ConfigError for half of a pair."""
    train = Annotations(coco, images)
    if val_coco is not None and val_images is not None:
        return train, Annotations(val_coco, val_images)
    if val_coco is val_images:
        return train, None
    missing, given = ("--val-coco", val_images) if val_coco is None else ("--val-images", val_coco)
    rule = f"is wanted together with {given}"
    raise ConfigError([Problem(missing, None, rule, "give both, or none: then a share of the images is held out")])


def _said(made: MadeProject) -> Iterable[str]:
    found = made.measures
    yield (
        f"answers: up to {found.objects:,} objects and {found.longest_answer:,} tokens, in the mean"
        f" {found.mean_answer:,.0f}"
    )
    yield f"model: {made.folders.model}"


def _shown(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """Yield items with a progress bar, where there is a terminal."""
    console = Console(stderr=True)
    yield from track(items, what, total=total, console=console, transient=True, disable=not console.is_terminal)
