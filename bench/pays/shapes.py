"""Scenes of boxes and ellipses, annotated from top to bottom or in no order, all or in part, and a start.

The same scenes in two orders tell behaviour from perception: what is lost without an order is not lost to the eyes.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.pays.arms import Sizes

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_model import scenes  # noqa: E402 of the examples
from tiny_model.scenes import Scene  # noqa: E402

SEED = 7
HELD_OUT = "held-out"
KINDS = "box", "ellipse"
TRIES = 800
SIGMA = 8.0
TOKENIZER_FILES = "chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"


def scene(part: str, index: int, sizes: Sizes) -> Scene:
    """Return scene `index` of a part, with all of its shapes; they are the same in each order."""
    rng, size = random.Random(f"order/{SEED}/{part}/{index}"), sizes.side
    background = rng.randint(200, 245), rng.randint(200, 245), rng.randint(200, 245)
    wanted = rng.randint(sizes.least_objects, sizes.most_objects)
    shortest, longest = round(sizes.smallest * size), round(sizes.largest * size)
    boxes: list[scenes.Box] = []
    for _ in range(TRIES):
        if len(boxes) == wanted:
            break
        width, height = rng.randint(shortest, longest), rng.randint(shortest, longest)
        x, y = rng.randint(0, size - width), rng.randint(0, size - height)
        box = (x, y, x + width, y + height)
        if all(scenes.apart(box, other) for other in boxes):
            boxes.append(box)
    shapes = [scenes.shape(rng, box, KINDS) for box in sorted(boxes, key=lambda box: (box[1], box[0]))]
    if sizes.order == "random":
        random.Random(f"shuffle/{SEED}/{part}/{index}").shuffle(shapes)
    return Scene(size, background, tuple(shapes))


def labelled(one: Scene, sizes: Sizes) -> Scene:
    """Return a scene with the shapes that its annotator has listed, at least one."""
    rng = random.Random(f"unlabelled/{SEED}/{one.shapes}")
    kept = tuple(shape for shape in one.shapes if rng.random() >= sizes.unlabelled)
    return replace(one, shapes=kept or one.shapes[:1])


def write_pictures(folder: Path, sizes: Sizes) -> None:
    """Write `train.jsonl` and `val.jsonl` and the pictures that they name; the last of these files comes last."""
    from PIL import Image

    from tiny_model.dataset import record

    (folder / "images").mkdir(parents=True, exist_ok=True)
    for part, name, count in (("train", "train", sizes.train), (HELD_OUT, "val", sizes.held_out)):
        lines = []
        for index in range(count):
            one, image = scene(part, index, sizes), f"images/{part}-{index:05d}.png"
            Image.fromarray(scenes.draw(one)).save(folder / image)
            listed = one if part == HELD_OUT else labelled(one, sizes)
            lines.append(json.dumps(record(listed, image)) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_start(model: Path, sizes: Sizes, output: Path) -> None:
    """Train the tiny model on fresh scenes with its warm-up's recipe, `places_steps` long, and write it."""
    import torch
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    from tiny_model.answers import COORD_TOKENS, write
    from tiny_model.batches import Batches, Task
    from tiny_model.model import build_processor
    from tiny_model.warm_up import Recipe, answer_loss, fit

    processor = build_processor(AutoTokenizer.from_pretrained(model), size=sizes.side)
    learner = Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    task = Task(
        sizes.prompt,
        write=lambda one: write(labelled(one, sizes)),
        longest_answer=sizes.answer + 128,
        scene=lambda index: scene("warm-up", index, sizes),
    )
    recipe = Recipe(sizes.places_steps, sizes.stage1_batch, sizes.stage1_rate, warm_up_steps=40)
    coordinates = torch.tensor(processor.tokenizer.convert_tokens_to_ids(COORD_TOKENS))
    batches = Batches(processor, learner, seed=SEED, size=recipe.batch_size, task=task)
    loss = partial(answer_loss, coord_ids=coordinates, sigma=SIGMA)
    fit(learner, batches, recipe, loss, lambda step, value: print(step, f"{value:.3f}", flush=True))
    learner.save_pretrained(output)
    processor.save_pretrained(output)
    for name in TOKENIZER_FILES:
        shutil.copy(model / name, output)
