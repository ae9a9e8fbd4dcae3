"""The sizes of a run, each derived from measures of its data and its machine, with the reason."""

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
    """How an image processor resizes. side: pixels of a token's square. least, most: pixels of a resized image."""

    side: int
    least: int
    most: int

    def resized(self, size: Size, most: int | None = None) -> Size:
        """Return width and height after resizing; `most` lowers the pixel limit."""
        width, height = size
        limit = self.most if most is None else min(most, self.most)
        high, wide = smart_resize(height, width, factor=self.side, min_pixels=self.least, max_pixels=limit)
        return wide, high

    def tokens(self, size: Size, most: int | None = None) -> int:
        """Return the number of tokens of an image of this size."""
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
    """Measure the records of a data set. shown: yields them and shows progress."""
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
    """Return the tokens of a prompt without those of its image; no image of the data is decoded."""
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
_LISTED_TWICE = 1.5  # times a correct answer: the rollout and the appended missed objects


@dataclass(frozen=True)
class Chosen:
    """A value, and the reason for it."""

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
    new_tokens = _round_up(found.longest_answer * ROOM_IN_ANSWERS, 64)
    image = max(found.patches.tokens(size, pixels.value) for size in found.images)
    prompt = found.prompt + image
    looked_at = min(HELD_OUT_LOOKED_AT if gpus else CPU_HELD_OUT_LOOKED_AT, found.held_out)
    return Sizes(
        max_pixels=pixels,
        max_new_tokens=Chosen(new_tokens, f"the longest answer has {found.longest_answer:,} tokens; a quarter more"),
        max_model_len=Chosen(
            _round_up(prompt + new_tokens + 1, 64),
            f"the longest prompt ({prompt:,} tokens, {image:,} of them for the image) and max_new_tokens",
        ),
        top_k=Chosen(min(found.objects, TOP_K), f"an image has up to {found.objects:,} objects"),
        sigma=_sigma(found, pixels.value),
        looked_at=Chosen(looked_at, f"of {found.held_out:,} held-out records"),
        stage1=_stage1(found, prompt, gpus),
        stage2=_stage2(found, prompt, new_tokens, gpus),
    )


def _max_pixels(found: Measures) -> Chosen:
    """Return the pixels of the largest image after resizing, at most 1,024 tokens of Qwen3-VL."""
    width, height = max((found.patches.resized(size) for size in found.images), key=math.prod)
    largest = width * height
    if largest > MOST_PIXELS:
        tokens = MOST_PIXELS // found.patches.side**2
        return Chosen(MOST_PIXELS, f"the largest images have {largest:,} pixels; this is {tokens:,} tokens")
    return Chosen(largest, f"the model sees the largest images with {width} x {height} pixels")


def _sigma(found: Measures, pixels: int) -> Chosen:
    """Return the sigma of coordinate targets: nearly a pixel of the smallest image, at least 2 bins."""
    shorter = min(min(found.patches.resized(size, pixels)) for size in found.images)
    bins = BINS / shorter
    return Chosen(round(max(SIGMA_BINS, SIGMA_PIXELS * bins), 1), f"bins; a pixel is up to {bins:.1f} bins wide")


def _stage1(found: Measures, prompt: int, gpus: int) -> Stage:
    batch, micro = _divide_batch(_batch(found.records) if gpus else CPU_BATCH, found.records, max(gpus, 1))
    longest, mean = prompt + found.longest_answer, prompt + found.mean_answer
    row = _row(longest, mean, batch, max(gpus, 1), "the longest sample")
    if not gpus:
        return _stage(batch, micro, CPU_STAGE1_STEPS, "after which the boxes of a tiny model follow the objects", row)
    why = f"about {STAGE1_PASSES} passes over {found.records:,} records"
    return _stage(batch, micro, math.ceil(found.records * STAGE1_PASSES / batch), why, row)


def _stage2(found: Measures, prompt: int, new_tokens: int, gpus: int) -> Stage:
    batch, micro = _divide_batch(STAGE2_BATCH if gpus else CPU_BATCH, found.records, 1)
    longest, mean = prompt + new_tokens + found.longest_answer, prompt + _LISTED_TWICE * found.mean_answer
    row = _row(longest, mean, batch, 1, "a full answer with all objects appended")
    if not gpus:
        return _stage(batch, micro, CPU_STAGE2_STEPS, "a few minutes", row)
    why = f"about one pass over {found.records:,} records, at most {STAGE2_STEPS} steps"
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


def _divide_batch(wanted: int, records: int, processes: int) -> tuple[int, int]:
    """Return the records of an optimizer step and of a micro-step in each process, close to `wanted`.

    A step is a whole number of micro-steps of all processes; a run would round any other number up.
    """
    wanted = min(wanted, records)
    micro = max(1, min(LARGEST_MICRO_BATCH, wanted // processes))
    at_once = micro * processes
    return at_once * max(1, min(round(wanted / at_once), records // at_once)), micro


def _batch(records: int) -> int:
    fitting = [batch for batch in BATCHES if records >= batch * STEPS_OF_A_PASS]
    return max(fitting, default=BATCHES[0])


def _row(longest: int, mean: float, batch: int, processes: int, what: str) -> Chosen:
    """Return the tokens of a packed row: a process's share of a step, within the limit of a GPU."""
    share = min(mean * batch / processes, ROW_TOKENS)
    return Chosen(_round_up(max(longest, share), 100), f"{what} has up to {longest:,} tokens, {mean:,.0f} on average")


def _round_up(value: float, step: int) -> int:
    return math.ceil(value / step) * step
