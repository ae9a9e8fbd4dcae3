"""How fast coordinate tokens are learnt from each kind of start row (`stage2 prepare --start`).

A stock model knows numerals, so the tiny one is first taught to list shapes with coordinates spelt in digits. Then the
tokens are added with each kind of row, and a short stage 1 teaches the same task with tokens: the same images, rate and
seeds for each kind. What is compared is the loss on the way and the held-out objects after it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch

from stage2_api.coordinates import COORD_TOKEN
from stage2_trainer.prepare.coordinate_tokens import STARTS, Start

if TYPE_CHECKING:
    from tiny_model.scenes import Scene

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS_OF_DIGITS, STEPS = 1200, 300
REPORT_AT = (25, 50, 100, 200, 300)
WINDOW = 10  # steps that a loss is the mean of
SEEDS = (1, 2, 3)
HELD_OUT = 200
RATE = 1e-3
MODEL_SEED = 7


class StartTable:
    """One row for each kind of start row."""

    def lines(self) -> Iterator[str]:
        """The table's lines; it takes some twenty minutes of one core, and says how far it is."""
        command = [sys.executable, "-m", "bench.start_rows"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([*command, folder], check=True, stdout=subprocess.PIPE, text=True, env=environment)
        yield from shown(json.loads(done.stdout.splitlines()[-1]))


def shown(found: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """The table of what was found for each kind, a figure for each seed."""
    yield f"\n## Start rows of coordinate tokens, stage 1 of {STEPS} steps, {len(SEEDS)} seeds\n\n"
    yield f"Loss is the mean of {WINDOW} steps up to that one; ± is the standard deviation over seeds.\n\n"
    losses = " | ".join(f"loss at {step}" for step in REPORT_AT)
    yield f"| start | {losses} | recall at IoU 0.5 | mean IoU |\n"
    yield f"| --- | {' | '.join('---:' for _ in range(len(REPORT_AT) + 2))} |\n"
    for start, runs in found.items():
        columns = [[run["losses"][str(step)] for run in runs] for step in REPORT_AT]
        columns += [[run[name] for run in runs] for name in ("recall", "iou")]
        yield f"| {start} | {' | '.join(f'{fmean(one):.3f} ± {stdev(one):.3f}' for one in columns)} |\n"


def digits(scene: Scene) -> str:
    """The true answer for a scene, its coordinates spelt in digits."""
    from tiny_model.answers import write

    return COORD_TOKEN.sub(lambda token: token[1], write(scene))


def teach_digits(folder: Path) -> None:
    """Save a model that lists shapes with coordinates in digits."""
    from tiny_model.answers import PROMPT
    from tiny_model.batches import Batches, Task
    from tiny_model.checkpoint import save
    from tiny_model.model import build_model, build_processor
    from tiny_model.tokenizer import build_tokenizer
    from tiny_model.warm_up import Recipe, fit, text_loss

    tokenizer = build_tokenizer(MODEL_SEED, plain=True)
    model, processor = build_model(tokenizer, MODEL_SEED), build_processor(tokenizer)
    recipe = Recipe(steps=STEPS_OF_DIGITS)
    task = Task(PROMPT, digits, max_shapes=2)  # three digits a coordinate: longer answers than the model's own
    batches = Batches(processor, model, seed=MODEL_SEED, size=recipe.batch_size, task=task)
    fit(model, batches, recipe, text_loss, _progress_to_stderr("digits"))
    save(folder, model, processor)


def stage1(folder: Path, seed: int) -> dict[str, Any]:
    """Teach a prepared model the tokens; its losses at the reported steps, and what it finds afterwards."""
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    from tiny_model.dataset import Part
    from tiny_model.evaluate import quality
    from tiny_model.warm_up import Recipe, train

    processor: Any = AutoProcessor.from_pretrained(folder)
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    losses: list[float] = []
    tell = _progress_to_stderr(f"{folder.name}, seed {seed}")

    def on_step(step: int, loss: float) -> None:
        losses.append(loss)
        tell(step, loss)

    recipe = Recipe(steps=STEPS, learning_rate=RATE, warm_up_steps=20)
    train(model, processor, recipe, seed=MODEL_SEED + seed, on_step=on_step)
    part = Part("held-out", HELD_OUT, MODEL_SEED)
    found, _ = quality(model, processor, [part.scene(index) for index in range(part.count)])
    at = {str(step): fmean(losses[step - WINDOW : step]) for step in REPORT_AT}
    return {"losses": at, "recall": found.recall_at_50, "iou": found.mean_iou}


def _progress_to_stderr(what: str) -> Any:
    def on_step(step: int, loss: float) -> None:
        if step % 100 == 0:
            print(f"{what}: step {step}, loss {loss:.3f}", file=sys.stderr, flush=True)

    return on_step


def main() -> None:
    """Do it all in a folder; the last line is the figures."""
    from stage2_trainer.prepare.coordinate_tokens import prepare

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    teach_digits(folder / "digits")
    found: dict[Start, list[dict[str, Any]]] = {}
    for start in STARTS:
        prepare(str(folder / "digits"), folder / start, start=start)
    for seed in SEEDS:
        for start in STARTS:
            found.setdefault(start, []).append(stage1(folder / start, seed))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
