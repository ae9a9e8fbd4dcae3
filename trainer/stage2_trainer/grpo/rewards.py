"""What a reward sees, and the rewards of stage2: pure functions of an answer and its record.

`objects.*` score lists of objects by the matching of `stage2 evaluate` (semantics section 15.5), `summary.*` score
summaries (section 15.6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stage2_api.errors import refused
from stage2_trainer.data.records import Record
from stage2_trainer.grpo.summaries import Contract, SummarySample
from stage2_trainer.grpo.summary_rewards import summary_rewards
from stage2_trainer.matching import GTObject
from stage2_trainer.scores.scored_image import Comparison, ReadAnswer, ScoredImage, read_answer

if TYPE_CHECKING:
    from stage2_trainer.scores.image_counts import ImageCounts

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_end|>")


@dataclass(frozen=True)
class Sample:
    """An answer and its record: what a reward sees.

    raw: the answer. contract: of summaries, where the run has one. comparison: how all records of the run are compared;
    None compares this record alone.
    """

    raw: str
    record: Record
    contract: Contract | None = None
    comparison: Comparison | None = None

    @cached_property
    def text(self) -> str:
        """The answer without special tokens, stripped."""
        text = self.raw
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "")
        return text.strip()

    @property
    def objects(self) -> tuple[GTObject, ...]:
        """The record's objects; coordinates are bins 0..999, x and y in turn."""
        return self.record.objects

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image in pixels."""
        return self.record.width, self.record.height

    @property
    def images(self) -> tuple[str, ...]:
        """Paths of the record's images, or `data:` URLs."""
        return self.record.images

    @property
    def metadata(self) -> Any:
        """The record's metadata, a mapping."""
        return self.record.metadata

    @cached_property
    def answer(self) -> ReadAnswer:
        """The answer, parsed: `objects`, and whether it is `parsed`, `truncated` or `looped`."""
        return read_answer(self.text)

    @cached_property
    def scored(self) -> ScoredImage:
        """The answer beside its record: `iou` of answered (rows) and true objects, `names`, `duplicates`.

        `iou` is read-only, because all rewards of an answer share it.
        """
        comparison = self.comparison or Comparison.from_records([self.record])
        image = comparison.image(self.record, self.answer)
        image.iou.setflags(write=False)
        return image

    @cached_property
    def counts(self) -> ImageCounts:
        """The numbers of right, judged and true objects at IoU 0.5."""
        return _counts(self.scored)

    @cached_property
    def summary(self) -> SummarySample:
        """The answer and its record as summaries. Raises ConfigError without a contract."""
        if self.contract is None:
            rule = "rewards named summary.* score against the contract of summaries"
            raise refused("custom.grpo.summary", None, rule, "write the section, or take other rewards")
        return SummarySample(self.text, self.record.metadata, self.contract)


Function = Callable[[Sample], float]


def f1(sample: Sample) -> float:
    """F1 at IoU 0.5, whatever the names."""
    counts = sample.counts
    return _share(sample, 2 * counts.right, counts.judged + counts.truth)


def f1_class(sample: Sample) -> float:
    """F1 at IoU 0.5 of objects with the true name."""
    counts = sample.counts
    return _share(sample, 2 * counts.class_right, counts.class_judged + counts.truth)


def box_f1(sample: Sample) -> float:
    """F1 at IoU 0.5 of the boxes around objects, whatever the names and outlines."""
    counts = _counts(replace(sample.scored, masks=False))
    return _share(sample, 2 * counts.right, counts.judged + counts.truth)


def iou(sample: Sample) -> float:
    """F1 without a threshold, whatever the names: a pair counts its overlap, in the pairing with the largest sum."""
    from stage2_trainer.scores import image_counts  # scipy, which checks of names do without

    image, counts = sample.scored, sample.counts
    overlap = image.iou[:, ~image.crowds]
    overlap = overlap[image_counts.judged(image, image_counts.matches(overlap), image.iou)]
    total = float(sum(overlap[pair] for pair in image_counts.matches(overlap, close=0.0)))
    return _share(sample, 2 * total, counts.judged + counts.truth)


def count(sample: Sample) -> float:
    """The smaller of the numbers of answered and of true objects, divided by the larger."""
    numbers = sample.counts.judged, sample.counts.truth
    return _share(sample, min(numbers), max(numbers))


def format_(sample: Sample) -> float:
    """1 for a whole answer, each of whose objects can be matched; else 0."""
    return float(sample.answer.parsed)


def _counts(image: ScoredImage) -> ImageCounts:
    from stage2_trainer.scores.image_counts import image_counts  # scipy, which checks of names do without

    return image_counts(image)


def _share(sample: Sample, part: float, whole: float) -> float:
    """Return part / whole; where neither record nor answer has an object, whether the answer is a whole, empty list."""
    return part / whole if whole else format_(sample)


def known_rewards() -> dict[str, Function]:
    """Return the rewards of this package by name."""
    of_objects = {
        f"objects.{one.__name__.removesuffix('_')}": one for one in (f1, f1_class, box_f1, iou, count, format_)
    }
    return {**of_objects, **{name: _on_summary(one) for name, one in summary_rewards().items()}}


def _on_summary(function: Callable[[SummarySample], float]) -> Function:
    return lambda sample: function(sample.summary)
