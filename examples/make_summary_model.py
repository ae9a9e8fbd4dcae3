"""Make the tiny model that GRPO starts from: the tiny Qwen3-VL, taught summaries by a careless annotator.

    python examples/make_summary_model.py examples/tiny-summaries     # a minute on one CPU core

It writes summaries, half of them in another form than requested, and half of the colours guessed: enough right answers
for rewards to tell them from the others, and room to improve. The folder is a checkpoint for transformers and vLLM,
with a model card.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: nothing is fetched here

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from tiny_model.batches import Batches, Task, encode_prompts
from tiny_model.checkpoint import save
from tiny_model.foreign import Model, Processor
from tiny_model.scenes import Scene, make_scene
from tiny_model.summaries import HEADER, MAX_SHAPES, PROMPT, CarelessAnnotator, summary, write
from tiny_model.warm_up import Recipe, fit, text_loss

RECIPE = Recipe(steps=250, warm_up_steps=20)
_STEPS_A_LINE = 50
_MAX_NEW_TOKENS = 80
_START = Path(__file__).parent / "tiny-qwen3-vl"
_CARD = """\
# tiny-summaries

The model of [tiny-qwen3-vl](../tiny-qwen3-vl/README.md), taught to answer `{prompt}` with a summary such as

    {header}
    {line}

by a careless annotator: half of its answers lack the header, half of its colours are guesses. It is where
[the tiny GRPO run](../../docs/grpo.md) starts: rewards have to teach what the annotator did not.

Of {images} answers to held-out images, drawn at temperature 1, {form:.0%} have the form that is asked for,
and {right:.0%} name the right colours, in whichever form.

Made by `python examples/make_summary_model.py examples/tiny-summaries`: {steps} steps of teacher forcing with
{batch_size} new images each, the vision tower frozen; a minute on one CPU core.
"""


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint; made if missing.")],
    start: Annotated[Path, typer.Option(help="The checkpoint to start from.")] = _START,
    steps: Annotated[int, typer.Option(min=1, help="Steps of teacher forcing.")] = RECIPE.steps,
    held_out: Annotated[int, typer.Option(min=1, help="Images to measure the model on.")] = 200,
    seed: Annotated[int, typer.Option(help="Of images, of the annotator, and of the answers measured.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Of torch. With other work on the cores, 1 is the fastest.")] = 1,
) -> None:
    """Make the tiny model that GRPO starts from."""
    torch.set_num_threads(threads)
    processor: Processor = AutoProcessor.from_pretrained(start)
    model: Model = Qwen3VLForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
    recipe = Recipe(steps=steps, warm_up_steps=RECIPE.warm_up_steps)
    seconds = teach(model, processor, recipe, seed)
    save(folder, model, processor)
    scenes = [make_scene(seed, "held-out", index, max_shapes=MAX_SHAPES) for index in range(held_out)]
    form, right = examine(folder, processor, scenes, seed)
    print(f"{folder}: {form:.0%} of answers have the form, {right:.0%} the right colours ({seconds:.0f} s)")
    lines = {"prompt": PROMPT, "header": HEADER, "line": write(scenes[0]).removeprefix(f"{HEADER}\n")}
    figures = {"form": form, "right": right, "images": held_out}
    card = _CARD.format(**lines, **figures, steps=steps, batch_size=recipe.batch_size)
    (folder / "README.md").write_text(card, encoding="utf-8")


def teach(model: Model, processor: Processor, recipe: Recipe, seed: int) -> float:
    """Train on the annotator's answers, and return the seconds it took. What the model sees stays what it saw."""
    model.model.visual.requires_grad_(False)
    task = Task(PROMPT, CarelessAnnotator(seed).write, MAX_SHAPES)
    batches = Batches(processor, model, seed=seed, size=recipe.batch_size, task=task)
    start = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        if step % _STEPS_A_LINE == 0:
            print(f"step {step:5} loss {loss:.3f} {time.monotonic() - start:6.0f} s")

    fit(model, batches, recipe, text_loss, on_step)
    return time.monotonic() - start


@torch.inference_mode()
def examine(folder: Path, processor: Processor, scenes: Sequence[Scene], seed: int) -> tuple[float, float]:
    """Return the share of sampled answers in the right form, and of those with the right colours."""
    model: Model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    prompts = encode_prompts(processor, scenes, PROMPT)
    torch.manual_seed(seed)
    ids = model.generate(**prompts, max_new_tokens=_MAX_NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0)
    answers = processor.tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    form = sum(_colours(answer.removeprefix(f"{HEADER}\n")) is not None and HEADER in answer for answer in answers)
    true = [_colours(json.dumps(summary(scene))) for scene in scenes]
    right = sum(_colours(text.strip().split("\n")[-1]) == wanted for text, wanted in zip(answers, true, strict=True))
    return form / len(scenes), right / len(scenes)


def _colours(line: str) -> set[str] | None:
    """Return the colours that a line of JSON names; None where it is no summary."""
    try:
        return {item["desc"] for item in json.loads(line)["items"]}
    except (ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    typer.run(main)
