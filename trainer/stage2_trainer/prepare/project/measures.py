"""Measures of a data set that decide a run's sizes: tokens of answers and prompts, images, objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

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
