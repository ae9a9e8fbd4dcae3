"""Make the tiny Qwen3-VL: tokenizer, processor, random weights, then a warm-up on shapes until it writes good answers.

    python examples/make_tiny_model.py out/tiny-qwen3-vl                # warmed up: 8 minutes on one CPU core
    python examples/make_tiny_model.py out/tiny-random --steps 0        # random weights, at once

The folder is a checkpoint for transformers and vLLM. After a warm-up it also holds a model card with figures on
held-out images, the same figures as metrics.json, and a picture.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: nothing is fetched here

import math
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import Qwen3VLForConditionalGeneration

from tiny_model.answers import Answer
from tiny_model.card import HeldOut, Making, write_card
from tiny_model.checkpoint import save
from tiny_model.dataset import Part
from tiny_model.evaluate import Quality, quality
from tiny_model.foreign import Model, Processor
from tiny_model.model import build_model, build_processor
from tiny_model.tokenizer import build_tokenizer
from tiny_model.warm_up import Recipe, train

_STEPS_A_LINE = 50


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint; made if missing.")],
    steps: Annotated[int, typer.Option(min=0, help="Steps of warm-up; 0 leaves the weights random.")] = Recipe.steps,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a step.")] = Recipe.batch_size,
    held_out: Annotated[int, typer.Option(min=1, help="Images to measure the warmed model on.")] = 200,
    seed: Annotated[int, typer.Option(help="Of weights, tokenizer and images.")] = 7,
    plain: Annotated[
        bool, typer.Option("--plain", help="Without coordinate tokens, as a stock model: for `stage2 prepare`.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Of torch. With other work on the cores, 1 is the fastest.")] = 1,
) -> None:
    """Make the tiny Qwen3-VL and warm it up."""
    torch.set_num_threads(threads)
    if plain and steps:
        raise typer.BadParameter("answers need coordinate tokens: use --steps 0", param_hint="--plain")
    tokenizer = build_tokenizer(seed, plain=plain)
    model, processor = build_model(tokenizer, seed), build_processor(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}")
    recipe = Recipe(steps=steps, batch_size=batch_size)
    minutes = warm_up(model, processor, recipe, seed) if steps else 0.0
    save(folder, model, processor)
    print(f"{folder}: checkpoint written ({minutes:.1f} minutes of warm-up)")
    if steps:
        parameters = sum(p.numel() for p in model.parameters())
        making = Making(_command(folder), seed, minutes, parameters, len(tokenizer), recipe)
        write_card(folder, making, examine(folder, processor, Part("held-out", held_out, seed)))


def examine(folder: Path, processor: Processor, part: Part) -> HeldOut:
    """Measure the weights that were saved, in both precisions that people run them in, on held-out images."""
    scenes = [part.scene(index) for index in range(part.count)]
    figures: dict[str, Quality] = {}
    answers: list[Answer] = []
    for dtype in ("float32", "bfloat16"):
        saved = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        figures[dtype], answers = quality(saved, processor, scenes)
        print(f"{dtype}: {figures[dtype]}")
    return HeldOut(scenes, figures, answers)


def warm_up(model: Model, processor: Processor, recipe: Recipe, seed: int) -> float:
    """Train with a progress line, and return the minutes it took."""
    columns = (
        TextColumn("warm-up"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    start = time.monotonic()
    with Progress(*columns) as progress:
        task = progress.add_task("", total=recipe.steps, loss=math.nan)

        def on_step(step: int, loss: float) -> None:
            progress.update(task, completed=step, loss=loss)
            if step % _STEPS_A_LINE == 0:  # what remains to be read in a log file, where no line moves
                progress.console.print(f"step {step:5} loss {loss:.3f} {time.monotonic() - start:6.0f} s")

        train(model, processor, recipe, seed=seed, on_step=on_step)
    return (time.monotonic() - start) / 60


def _command(folder: Path) -> str:
    options = [argument for argument in sys.argv[1:] if argument != str(folder)]
    return " ".join(["python examples/make_tiny_model.py", f"examples/{folder.name}", *options])


if __name__ == "__main__":
    typer.run(main)
