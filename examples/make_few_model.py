"""Make the tiny model that the demo starts from: tiny-unordered, taught by the 150 images of the few-images data set.

    python examples/make_few_model.py examples/tiny-few     # a minute on one CPU core

The folder is a checkpoint for transformers and vLLM, with a model card.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: nothing is fetched here

from pathlib import Path
from typing import Annotated

import torch
import typer

from make_unordered_model import teach
from tiny_model.answers import PROMPT
from tiny_model.checkpoint import save
from tiny_model.crowded import Crowd
from tiny_model.warm_up import Recipe

IMAGES = 150
RECIPE = Recipe(steps=100, warm_up_steps=5, learning_rate=1e-3)
_START = Path(__file__).parent / "tiny-unordered"
_CARD = """\
# tiny-few

The model of [tiny-unordered](../tiny-unordered/README.md), taught to list two to four shapes in rows by {images} images
that it saw {epochs} times each. It is where [the demo](../../README.md) starts.

Made by `python examples/make_few_model.py examples/tiny-few`: {steps} steps of teacher forcing with {batch_size} images
each; a minute on one CPU core.
"""


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint; made if missing.")],
    start: Annotated[Path, typer.Option(help="The checkpoint to start from.")] = _START,
    steps: Annotated[int, typer.Option(min=1, help="Steps of teacher forcing.")] = RECIPE.steps,
) -> None:
    """Make the tiny model that the demo starts from."""
    torch.set_num_threads(1)
    recipe = Recipe(steps=steps, warm_up_steps=RECIPE.warm_up_steps, learning_rate=RECIPE.learning_rate)
    save(folder, *teach(start, Crowd(order="rows"), recipe, PROMPT, IMAGES))
    epochs = round(steps * recipe.batch_size / IMAGES)
    card = _CARD.format(images=IMAGES, epochs=epochs, steps=steps, batch_size=recipe.batch_size)
    (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
