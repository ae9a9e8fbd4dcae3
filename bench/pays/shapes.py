"""The crowded scenes of the examples as data of the comparison, and a start that lists them."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

from bench.pays.arms import ARMS, Sizes

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_model.crowded import HELD_OUT, Crowd, Order  # noqa: E402 of the examples

TOKENIZER_FILES = "chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"


def crowd(sizes: Sizes) -> Crowd:
    """Return what the scenes look like."""
    look = (sizes.side, sizes.least_objects, sizes.most_objects, sizes.smallest, sizes.largest)
    return Crowd(*look, cast(Order, sizes.order), sizes.unlabelled, sizes.shelves)


def write_pictures(folder: Path, sizes: Sizes) -> None:
    """Write `train.jsonl` and `val.jsonl` and the pictures that they name; the last of these files comes last.

    The training scenes are written in each order in which an arm is annotated, too.
    """
    orders = sorted({arm.annotated for arm in ARMS.values() if arm.annotated})
    ordered = [("train", f"train-{order}.jsonl", replace(sizes, order=order), sizes.train) for order in orders]
    parts = [("train", "train.jsonl", sizes, sizes.train), (HELD_OUT, "val.jsonl", sizes, sizes.held_out)]
    for part, name, look, count in [*ordered, *parts]:
        for _ in crowd(look).write(folder, part, name, count):
            pass


def make_start(model: Path, sizes: Sizes, output: Path) -> None:
    """Train the tiny model on fresh scenes with its warm-up's recipe, `places_steps` long, and write it.

    Without such steps the start is the tiny model.
    """
    if not sizes.places_steps:
        shutil.copytree(model, output)
        return
    from make_unordered_model import RECIPE, teach

    recipe = replace(RECIPE, steps=sizes.places_steps, batch_size=sizes.stage1_batch, learning_rate=sizes.stage1_rate)
    learner, processor = teach(model, crowd(sizes), recipe, sizes.prompt)
    learner.save_pretrained(output)
    processor.save_pretrained(output)
    for name in TOKENIZER_FILES:
        shutil.copy(model / name, output)
