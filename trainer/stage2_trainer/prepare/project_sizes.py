"""The sizes of a run, each derived from what its data and its machine say, with the reason beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from stage2_api.coordinates import BINS
from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.images import BLANK_SIDE, blank_image
from stage2_trainer.data.messages import chat_messages
from stage2_trainer.data.records import Record
from stage2_trainer.matching.ground_truth import serialize_objects

Size = tuple[int, int]
Shown = Callable[[Iterable[Record]], Iterable[Record]]


@dataclass(frozen=True)
class Patches:
    """An image processor's rule. side: pixels of a token's square. least, most: pixels of an image that it makes."""

    side: int
    least: int
    most: int

    def resized(self, size: Size, most: int | None = None) -> Size:
        """Return width and height that an image of this size is brought to; `most` lowers the most pixels."""
        width, height = size
        limit = self.most if most is None else min(most, self.most)
        high, wide = smart_resize(height, width, factor=self.side, min_pixels=self.least, max_pixels=limit)
        return wide, high

    def tokens(self, size: Size, most: int | None = None) -> int:
        """Return how many tokens an image of this size becomes."""
        wide, high = self.resized(size, most)
        return wide * high // self.side**2


@dataclass(frozen=True)
class Measures:
    """The measures of a data set, in the tokens of a model.

    records, held_out: how many. objects: of the image with the most. longest_answer, mean_answer: with the end of the
    turn; the mean is that of the training records, all else is over both parts. prompt: tokens besides those of the
    image. images: how many of each width and height.
    """

    records: int
    held_out: int
    objects: int
    longest_answer: int
    mean_answer: float
    prompt: int
    images: Counter[Size]
    patches: Patches


def measure(train: Sequence[Record], held_out: Sequence[Record], processor: Any, prompt: str, shown: Shown) -> Measures:
    """Measure the records of a data set; `shown` passes them on."""
    encoder = Encoder(processor)
    everything = (*train, *held_out)
    lengths = [_answer_tokens(record, encoder) for record in shown(everything)]
    images = processor.image_processor
    return Measures(
        records=len(train),
        held_out=len(held_out),
        objects=max(len(record.objects) for record in everything),
        longest_answer=max(lengths),
        mean_answer=sum(lengths[: len(train)]) / len(train),
        prompt=_prompt_tokens(encoder, prompt),
        images=Counter((record.width, record.height) for record in everything),
        patches=Patches(
            side=images.patch_size * images.merge_size,
            least=images.size["shortest_edge"],
            most=images.size["longest_edge"],
        ),
    )


def _answer_tokens(record: Record, encoder: Encoder) -> int:
    ids = encoder.tokenizer.encode(serialize_objects(record.objects), add_special_tokens=False)
    return len(ids) + len(encoder.end_of_turn_ids)


def _prompt_tokens(encoder: Encoder, prompt: str) -> int:
    """Return the tokens of a prompt besides those of its image; no image of the data is decoded for it."""
    record = Record(index=0, sample_id="", images=(blank_image(),), width=BLANK_SIDE, height=BLANK_SIDE)
    encoded = encoder.prompt(chat_messages(record, prompt))
    assert encoded.image_grid_thw is not None, "a record has an image"
    patches = int(encoded.image_grid_thw.prod(-1).sum())
    merged = int(encoder.processor.image_processor.merge_size) ** 2
    return len(encoded.input_ids) - patches // merged


MOST_PIXELS = 2**20
ROW_TOKENS = 12_000
TOP_K = 10
SIGMA_BINS = 2.0
SIGMA_PIXELS = 0.8
ROOM_IN_ANSWERS = 1.25
BATCHES = (16, 32, 64, 128)
STEPS_OF_A_PASS = 100
STAGE1_PASSES, STAGE2_STEPS, STAGE2_BATCH = 4, 300, 32
CPU_STAGE1_STEPS, CPU_STAGE2_STEPS, CPU_BATCH = 1400, 20, 16
EVALUATIONS = 10
HELD_OUT_LOOKED_AT, CPU_HELD_OUT_LOOKED_AT = 256, 32
LARGEST_MICRO_BATCH = 8
_LISTED_TWICE = 1.5  # of what a right answer has: rollout and missed objects together


@dataclass(frozen=True)
class Chosen:
    """A value, and why it is this one."""

    value: Any
    why: str


@dataclass(frozen=True)
class Stage:
    """The batches and steps of a stage. records: of an optimizer step. micro: of a micro-step in each process."""

    records: Chosen
    micro: int
    steps: Chosen
    evaluate_every: Chosen
    row: Chosen


@dataclass(frozen=True)
class Sizes:
    """The sizes of both stages."""

    max_pixels: Chosen
    max_new_tokens: Chosen
    max_model_len: Chosen
    top_k: Chosen
    sigma: Chosen
    looked_at: Chosen
    stage1: Stage
    stage2: Stage


def choose(found: Measures, *, gpus: int) -> Sizes:
    """Return the sizes for a machine with so many GPUs; 0 means that it trains a tiny model on its CPU."""
    pixels = _max_pixels(found)
    new_tokens = _up(found.longest_answer * ROOM_IN_ANSWERS, 64)
    image = max(found.patches.tokens(size, pixels.value) for size in found.images)
    prompt = found.prompt + image
    looked_at = min(HELD_OUT_LOOKED_AT if gpus else CPU_HELD_OUT_LOOKED_AT, found.held_out)
    return Sizes(
        max_pixels=pixels,
        max_new_tokens=Chosen(new_tokens, f"the longest answer has {found.longest_answer:,} tokens; a quarter more"),
        max_model_len=Chosen(
            _up(prompt + new_tokens + 1, 64),
            f"the longest prompt ({prompt:,} tokens, {image:,} of them of the image) and max_new_tokens",
        ),
        top_k=Chosen(min(found.objects, TOP_K), f"an image has up to {found.objects:,} objects"),
        sigma=_sigma(found, pixels.value),
        looked_at=Chosen(looked_at, f"of {found.held_out:,} held-out records"),
        stage1=_stage1(found, prompt, gpus),
        stage2=_stage2(found, prompt, new_tokens, gpus),
    )


def _max_pixels(found: Measures) -> Chosen:
    """Return the pixels of the largest image as it comes to the model; the cap is 1,024 tokens of Qwen3-VL."""
    width, height = max((found.patches.resized(size) for size in found.images), key=math.prod)
    largest = width * height
    if largest > MOST_PIXELS:
        return Chosen(MOST_PIXELS, f"the largest images have {largest:,} pixels; this is {_tokens(found)} tokens")
    return Chosen(largest, f"the largest images come to the model with {width} x {height} pixels")


def _tokens(found: Measures) -> str:
    return f"{MOST_PIXELS // found.patches.side**2:,}"


def _sigma(found: Measures, pixels: int) -> Chosen:
    """Return the width of coordinates' targets: bins of nearly a pixel of the smallest image, and not below 2."""
    shorter = min(min(found.patches.resized(size, pixels)) for size in found.images)
    bins = BINS / shorter
    return Chosen(round(max(SIGMA_BINS, SIGMA_PIXELS * bins), 1), f"bins; a pixel is up to {bins:.1f} bins wide")


def _stage1(found: Measures, prompt: int, gpus: int) -> Stage:
    batch, micro = _dealt(_batch(found.records) if gpus else CPU_BATCH, found.records, max(gpus, 1))
    longest, mean = prompt + found.longest_answer, prompt + found.mean_answer
    row = _row(longest, mean, batch, max(gpus, 1), "the longest sample")
    if not gpus:
        return _stage(
            batch, micro, CPU_STAGE1_STEPS, "in which the boxes of a tiny model come to follow what is there", row
        )
    why = f"about {STAGE1_PASSES} passes over {found.records:,} records"
    return _stage(batch, micro, math.ceil(found.records * STAGE1_PASSES / batch), why, row)


def _stage2(found: Measures, prompt: int, new_tokens: int, gpus: int) -> Stage:
    batch, micro = _dealt(STAGE2_BATCH if gpus else CPU_BATCH, found.records, 1)
    longest, mean = prompt + new_tokens + found.longest_answer, prompt + _LISTED_TWICE * found.mean_answer
    row = _row(longest, mean, batch, 1, "a whole answer with all objects appended")
    if not gpus:
        return _stage(batch, micro, CPU_STAGE2_STEPS, "a few minutes", row)
    why = f"about a pass over {found.records:,} records, and not above {STAGE2_STEPS}"
    return _stage(batch, micro, min(STAGE2_STEPS, math.ceil(found.records / batch)), why, row)


def _stage(batch: int, micro: int, steps: int, why: str, row: Chosen) -> Stage:
    """Return a stage whose last step is evaluated and saved."""
    every = math.ceil(steps / EVALUATIONS)
    return Stage(
        records=Chosen(batch, "records of an optimizer step"),
        micro=micro,
        steps=Chosen(every * EVALUATIONS, why),
        evaluate_every=Chosen(every, f"{EVALUATIONS} times in the run"),
        row=row,
    )


def _dealt(wanted: int, records: int, processes: int) -> tuple[int, int]:
    """Return the records of an optimizer step and of a micro-step in each process, near what is wanted.

    A step is whole micro-steps of all processes, as a run makes it: another number would be rounded up there.
    """
    wanted = min(wanted, records)
    micro = max(1, min(LARGEST_MICRO_BATCH, wanted // processes))
    at_once = micro * processes
    return at_once * max(1, min(round(wanted / at_once), records // at_once)), micro


def _batch(records: int) -> int:
    fitting = [batch for batch in BATCHES if records >= batch * STEPS_OF_A_PASS]
    return max(fitting, default=BATCHES[0])


def _row(longest: int, mean: float, batch: int, processes: int, what: str) -> Chosen:
    """Return the tokens of a packed row: those of a process's share of a step, within what a GPU holds."""
    share = min(mean * batch / processes, ROW_TOKENS)
    return Chosen(_up(max(longest, share), 100), f"{what} has up to {longest:,} tokens, and a mean one {mean:,.0f}")


def _up(value: float, step: int) -> int:
    return math.ceil(value / step) * step
