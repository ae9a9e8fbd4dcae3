"""The regimes and the arms of the study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bench.pays.arms import FEW, Sizes

RECOMMENDED = {"recipe": "recommended"}
_UNMATCHED = {"assignment": "hungarian", "unmatched_objects": "neutral"}
NEUTRAL = {**RECOMMENDED, **_UNMATCHED, "duplicate_iou": 0.5}
SUPERVISED, MATCHED, REWARDED = "sft", "rollout_matching_sft", "grpo"


@dataclass(frozen=True)
class Regime:
    """What the images and their annotations are like.

    sizes: of images, answers and runs. start_steps: the steps at which a start is looked at; the best on the
    development images is taken. least: of the start's F1 for the regime to say something about behaviour.
    """

    sizes: Sizes
    start_steps: tuple[int, ...] = (50, 100, 150, 200)
    start_rate: float = 1e-3
    start_batch: int = 16
    leaves_out: str = ""


_FEW = replace(FEW, order="rows", held_out=500, steps=60, batch=8, rate=5e-4)
_MISSING = replace(_FEW, train=1000, steps=60)
REGIMES: Mapping[str, Regime] = {
    **{f"few-{count}": Regime(replace(_FEW, train=count)) for count in (150, 400, 1500)},
    **{
        f"missing-{share}": Regime(replace(_MISSING, unlabelled=share), (100, 200, 300, 400))
        for share in (0.2, 0.4, 0.6)
    },
    **{
        f"missing-{kind}": Regime(_MISSING, (100, 200, 300, 400), leaves_out=kind)
        for kind in ("small", "ellipses", "right")
    },
}


@dataclass(frozen=True)
class Arm:
    """One way to train on from a start.

    what: for the table. variant: of the trainer. matching: keys of `rollout_matching`. steps, rate: times those of the
    regime. cut: whether a target keeps the matched objects that begin the answer in the annotated order, and teaches
    all that follow anew. best_of: sampled answers to each image, the best of which is taught; 0: the annotations are.
    found_by: answers of the start whose boxes join the annotations where no label is and two answers agree; one answer
    is greedy, and its boxes join as they are. longer: whether these are answers under the bias that is best for the
    start on development images.
    reward: text of a Python file whose function `reward` scores answers; empty: F1 with class does.
    chosen: whether the checkpoint and the bias that are best on development images are arms of their own, too. biased:
    whether the bias alone is. quarters: whether the checkpoints after each quarter of the steps are.
    """

    what: str
    variant: str = MATCHED
    matching: Mapping[str, Any] = field(default_factory=dict)
    steps: float = 1.0
    rate: float = 1.0
    cut: bool = False
    best_of: int = 0
    found_by: int = 0
    longer: bool = False
    reward: str = ""
    chosen: bool = False
    biased: bool = False
    quarters: bool = False


LABELS_FOUND = '''"""A reward that does not punish boxes on which no label lies, because they may be objects."""


def reward(sample):
    """Share of the labels that the answer has, with their names, less that of its boxes that repeat another."""
    counts = sample.counts
    repeated = counts.duplicates / counts.answered if counts.answered else 0.0
    return counts.class_right / counts.truth - repeated if counts.truth else 0.0
'''
_HUNGARIAN = {**RECOMMENDED, "assignment": "hungarian"}
ARMS: Mapping[str, Arm] = {
    "a": Arm("stage 1 continued", SUPERVISED, chosen=True),
    "a-long": Arm("stage 1 continued, 8 / 3 of the steps", SUPERVISED, steps=8 / 3, chosen=True),
    "a-slow": Arm("stage 1 continued, a fifth of the rate", SUPERVISED, rate=0.2),
    "e": Arm("stage 2, recommended", matching=RECOMMENDED),
    "e-hungarian": Arm("stage 2, recommended, Hungarian assignment", matching=_HUNGARIAN),
    "cut": Arm("stage 2, the cut", matching=_HUNGARIAN, cut=True, chosen=True),
    "cut-sampled": Arm("stage 2, the cut, answers sampled", matching={**_HUNGARIAN, "temperature": 1.0}, cut=True),
    "cut-mixed": Arm("stage 2, the cut, half supervised", matching={**_HUNGARIAN, "supervised_share": 0.5}, cut=True),
    "best-of-8": Arm("stage 1 on the best of 8 sampled answers", SUPERVISED, best_of=8),
    "grpo": Arm("GRPO, F1 with class as reward", REWARDED, rate=0.06),
    "grpo-labels": Arm("GRPO, labels found less duplicates as reward", REWARDED, rate=0.06, reward=LABELS_FOUND),
    "own-labels": Arm("stage 1 with the start's own boxes as labels", SUPERVISED, found_by=1, biased=True),
    "own-labels-longer": Arm(
        "stage 1 with the start's own boxes under its best bias as labels", SUPERVISED, found_by=1, longer=True
    ),
    "own-labels-e": Arm("(e) with the start's own boxes as labels", matching=RECOMMENDED, found_by=1),
    "own-labels-n": Arm("(n) with the start's own boxes as labels", matching=NEUTRAL, found_by=1),
    "longer-e": Arm(
        "(e) with the start's own boxes under its best bias as labels", matching=RECOMMENDED, found_by=1, longer=True
    ),
    "agreed-labels": Arm("stage 1 with boxes as labels on which two of 4 answers agree", SUPERVISED, found_by=4),
    "n": Arm("stage 2, unmatched objects neutral, duplicates removed", matching=NEUTRAL, biased=True),
    "n-dynamic": Arm("(n), dynamic assignment", matching={**NEUTRAL, "assignment": "dynamic"}),
    "n-dropped": Arm("(n), unmatched objects dropped", matching={**NEUTRAL, "unmatched_objects": "dropped"}),
    "n-repeats": Arm("(n), duplicates kept", matching={**RECOMMENDED, **_UNMATCHED}),
    "n-long": Arm("(n), 25 / 3 of the steps", matching=NEUTRAL, steps=25 / 3, quarters=True),
    "n-mixed": Arm("stage 2, neutral, half supervised", matching={**NEUTRAL, "supervised_share": 0.5}),
}
EARLY, BIASED = "best step", "best bias"
BIASES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
