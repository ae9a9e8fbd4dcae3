"""The model card: what the checkpoint is, how it was made, how good it is, and a picture of its answers."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from PIL import Image

from stage2_trainer.data.drawing import Outline, draw_outlines, grid
from stage2_trainer.matching.ground_truth import GTObject
from tiny_model.answers import PROMPT, Answer, truth
from tiny_model.evaluate import Quality
from tiny_model.scenes import Scene, draw
from tiny_model.warm_up import Recipe

_COLUMNS, _ROWS = 4, 2
_CELL = 240
_ROW_NAMES = {
    "parse_rate": "parse rate",
    "recall_at_30": "recall at IoU 0.3",
    "precision_at_30": "precision at IoU 0.3",
    "recall_at_50": "recall at IoU 0.5",
    "precision_at_50": "precision at IoU 0.5",
    "mean_iou": "mean IoU of pairs with IoU >= 0.3",
    "desc_exact": "exact description, of the same pairs",
    "objects_predicted": "objects in an answer",
    "objects_true": "objects in an image",
}

_CARD = """\
# tiny-qwen3-vl

A Qwen3-VL with {parameters:,} parameters that lists coloured shapes. It has the real architecture, processor and chat
template, so transformers and vLLM load it as they load its big siblings, and it trains on a CPU in minutes. It knows
nothing but small images of shapes and one question, `{prompt}`, which it answers with one line of JSON:

    {answer}

Its start is good enough to write valid answers, and far from the best it can be: room that stage 2 is to use.

## How good it is

Greedy answers to {images} held-out images (1 to 4 shapes each). The weights are stored in bfloat16; the columns say in
what they were run.

{table}

![Held-out images: true shapes in green, the model's in red](held-out.png)

Each column of two pictures shows one image: the true shapes above, the model's answer below.

## How it was made

    {command}

From scratch: byte-level BPE learnt from 3000 answers ({vocabulary} tokens, 1000 of them coord tokens), random weights,
then {steps} steps of teacher forcing with {batch_size} new images each: {minutes:.1f} minutes on one CPU core.
Nothing was downloaded. The recipe, from `examples/tiny_model/warm_up.py`:

{recipe}

Seed {seed}; Python {python}, torch {torch}, transformers {transformers}. The same command on another machine gives the
same data and the same first weights; the trained weights differ in rounding, and so do the figures a little.
"""


@dataclass(frozen=True)
class Making:
    """How the checkpoint came to be."""

    command: str
    seed: int
    minutes: float
    parameters: int
    vocabulary: int
    recipe: Recipe


@dataclass(frozen=True)
class HeldOut:
    """The held-out scenes, the figures by the dtype that the model ran in, and the answers that the picture shows."""

    scenes: Sequence[Scene]
    quality: dict[str, Quality]
    answers: Sequence[Answer]


def write_card(folder: Path, making: Making, held_out: HeldOut) -> None:
    """Write README.md, metrics.json and held-out.png next to the checkpoint."""
    figures = {dtype: asdict(quality) for dtype, quality in held_out.quality.items()}
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }
    made = {**asdict(making), "recipe": asdict(making.recipe)}
    metrics = {"held_out": figures, "made": made, "versions": versions}
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_text(making, held_out, versions), encoding="utf-8")
    picture(held_out.scenes, held_out.answers).save(folder / "held-out.png", optimize=True)


def picture(scenes: Sequence[Scene], answers: Sequence[Answer]) -> Image.Image:
    """Return the first scenes in columns: the true shapes in green, and below them the answer's in red."""
    rows = []
    for first in range(0, _COLUMNS * _ROWS, _COLUMNS):
        shown = list(zip(scenes, answers, strict=True))[first : first + _COLUMNS]
        rows.append([_outlined(scene, truth(scene), "green") for scene, _ in shown])
        rows.append([_outlined(scene, answer.objects, "red") for scene, answer in shown])
    # 64 colours are enough for flat shapes and outlines, and make the file a third of its size.
    return grid(rows, [""] * _COLUMNS).quantize(64)


def _outlined(scene: Scene, objects: Sequence[GTObject], color: str) -> Image.Image:
    outlines = [Outline(o.kind, o.bins, o.desc, color) for o in objects]
    return draw_outlines(Image.fromarray(draw(scene)), outlines, width=_CELL)


def _text(making: Making, held_out: HeldOut, versions: dict[str, str]) -> str:
    recipe = asdict(making.recipe)
    return _CARD.format(
        **{
            **asdict(making),
            "recipe": "\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in recipe.items()),
        },
        **versions,
        prompt=PROMPT,
        answer=held_out.answers[0].text,
        images=len(held_out.scenes),
        table=_table(held_out.quality),
        steps=making.recipe.steps,
        batch_size=making.recipe.batch_size,
    )


def _table(qualities: dict[str, Quality]) -> str:
    lines = ["| | " + " | ".join(qualities) + " |", "| --- |" + " ---: |" * len(qualities)]
    for key, name in _ROW_NAMES.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{getattr(quality, key):.2f}" for quality in qualities.values()) + " |"
        )
    return "\n".join(lines)
