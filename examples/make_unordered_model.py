"""Make the tiny model that the studies start from: the tiny Qwen3-VL, taught by annotations without an order.

    python examples/make_unordered_model.py examples/tiny-unordered     # three minutes on one CPU core

The folder is a checkpoint for transformers and vLLM, with a model card. `bench/pays` makes its starts in the same way.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: nothing is fetched here

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from tiny_model.answers import COORD_TOKENS, PROMPT, write
from tiny_model.batches import Batches, Task
from tiny_model.checkpoint import save
from tiny_model.crowded import SEED, Crowd
from tiny_model.foreign import Model, Processor
from tiny_model.model import build_processor
from tiny_model.warm_up import Recipe, answer_loss, fit

RECIPE = Recipe(steps=400, warm_up_steps=40)
TOKENS_OF_A_SHAPE, FURTHER_TOKENS = 43, 128  # room for answers
_STEPS_A_LINE = 50
_START = Path(__file__).parent / "tiny-qwen3-vl"
_CARD = """\
# tiny-unordered

The model of [tiny-qwen3-vl](../tiny-qwen3-vl/README.md), taught to list two to four shapes by annotations without an
order. It sees the shapes, but it cannot know which one the next annotation will be, so its boxes are mixtures of
several shapes. It is where [the comparison](../../docs/results.md) and [tiny-few](../tiny-few/README.md) start.

Made by `python examples/make_unordered_model.py examples/tiny-unordered`: {steps} steps of teacher forcing with
{batch_size} new images each; three minutes on one CPU core.
"""


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint; made if missing.")],
    start: Annotated[Path, typer.Option(help="The checkpoint to start from.")] = _START,
    steps: Annotated[int, typer.Option(min=1, help="Steps of teacher forcing.")] = RECIPE.steps,
    threads: Annotated[int, typer.Option(min=1, help="Of torch. With other work on the cores, 1 is the fastest.")] = 1,
) -> None:
    """Make the tiny model that the studies start from."""
    torch.set_num_threads(threads)
    recipe = Recipe(steps=steps, warm_up_steps=RECIPE.warm_up_steps)
    model, processor = teach(start, Crowd(), recipe, PROMPT)
    save(folder, model, processor)
    card = _CARD.format(steps=steps, batch_size=recipe.batch_size)
    (folder / "README.md").write_text(card, encoding="utf-8")


def teach(start: Path, crowd: Crowd, recipe: Recipe, prompt: str, images: int = 0) -> tuple[Model, Processor]:
    """Train a checkpoint as the tiny model's own warm-up does; return it with its processor.

    images: of the part "train", seen again and again; 0: each scene is a fresh one.
    """
    tokenizer = AutoProcessor.from_pretrained(start).tokenizer
    processor = build_processor(tokenizer, size=crowd.size)
    model: Model = Qwen3VLForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
    task = Task(
        prompt,
        write=lambda scene: write(crowd.labelled(scene)),
        longest_answer=TOKENS_OF_A_SHAPE * crowd.most + FURTHER_TOKENS,
        scene=lambda index: crowd.scene("train", index % images) if images else crowd.scene("warm-up", index),
    )
    batches = Batches(processor, model, seed=SEED, size=recipe.batch_size, task=task)
    coordinates = torch.tensor(tokenizer.convert_tokens_to_ids(COORD_TOKENS))
    began = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        if step % _STEPS_A_LINE == 0:
            print(f"step {step:5} loss {loss:.3f} {time.monotonic() - began:6.0f} s", flush=True)

    fit(model, batches, recipe, partial(answer_loss, coord_ids=coordinates, sigma=recipe.sigma), on_step)
    return model, processor


if __name__ == "__main__":
    typer.run(main)
