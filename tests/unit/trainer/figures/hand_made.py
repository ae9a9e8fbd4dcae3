"""Samples made by hand, each with what a person counts in it. One character is one token, and so is a coordinate."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from stage2_trainer.data.records import Record
from stage2_trainer.learner.step_record import SampleStats
from stage2_trainer.learner.supervise import Matched, sample_stats
from stage2_trainer.matching import GroundTruth, GTObject, MatchOptions, build_target
from stage2_trainer.scores.scored_image import text_vocab
from stage2_trainer.wire.requests import Rollout

CAT = GTObject("cat", "bbox", (100, 100, 300, 300))
DOG = GTObject("dog", "bbox", (500, 500, 800, 800))
HALF = GTObject("fox", "bbox", (100, 100, 180, 300))  # IoU 0.4 with CAT: above the gate of 0.3, below 0.5
FAR = GTObject("owl", "bbox", (0, 700, 90, 900))  # overlaps nothing
SQUARE = GTObject("cat", "poly", (100, 100, 300, 100, 300, 300, 100, 300))  # the outline of CAT

TOP_K = 10
END_OF_TURN = 1
_COORDINATE = re.compile(r"<\|coord_\d+\|>")


def entry(number: int, one: GTObject) -> str:
    """Return the text of an object in an answer."""
    tokens = [f'"<|coord_{bin_}|>"' for bin_ in one.bins]
    pairs = [f"[{x}, {y}]" for x, y in zip(tokens[0::2], tokens[1::2], strict=True)]
    key, values = ("bbox_2d", tokens) if one.kind == "bbox" else ("poly", pairs)
    return f'"object_{number}": {{"desc": "{one.desc}", "{key}": [{", ".join(values)}]}}'


def begun(*objects: GTObject) -> str:
    """Return the answer that lists these objects, without its closing brace."""
    return "{" + ", ".join(entry(number, one) for number, one in enumerate(objects, 1))


def tokens(text: str) -> int:
    """Count the tokens of a text."""
    return len(_COORDINATE.sub("#", text))


@dataclass(frozen=True)
class Sample:
    """One sample: its truth, its answer, the options of matching, and what a person counts.

    answered, broken: objects of the answer that are valid, and that are not. truncated: the answer ends within the
    JSON. found: answered objects that match a true one by the gate; close: those with an IoU of at least 0.5; overlap:
    the sum of their IoU. following: boxes that match nothing and are trained towards a true one. below_gate: compared
    pairs below the gate. repeats, removed, penalised: objects that a variant removes or penalises. appended: true
    objects in the tail. targets: coordinates of the prefix that have a target. prefix, tail: the texts of `Y_train`.
    silent: tokens of the tail without a loss. skipped, cut: the answer was too long for a row. bad: it was set aside.
    """

    truth: tuple[GTObject, ...]
    answer: str
    options: dict[str, Any] = field(default_factory=dict)
    answered: int = 0
    broken: int = 0
    truncated: bool = False
    found: int = 0
    close: int = 0
    overlap: float = 0.0
    following: int = 0
    below_gate: int = 0
    repeats: int = 0
    removed: int = 0
    penalised: int = 0
    appended: int = 0
    targets: int = 0
    prefix: str = ""
    tail: str = "}"
    silent: int = 0
    skipped: bool = False
    cut: bool = False
    bad: bool = False
    prompt: int = 7
    drafted: int = 0
    accepted: int = 0
    verified: tuple[int, ...] = ()
    server: str = "server"
    beam: bool = False
    repeated: bool = False
    at_limit: bool = False
    staleness: int = 0

    @property
    def true(self) -> int:
        """The true objects."""
        return len(self.truth)

    def matched(self, index: int = 0) -> Matched:
        """Return the record with the given index and its answer, matched by the learner's own rules."""
        vocab = text_vocab()
        ids = vocab.encode(self.answer)
        rollout = Rollout(
            list(range(self.prompt)),
            ids,
            self.answer,
            self.server,
            0,
            "repetition" if self.repeated else "length" if self.at_limit else "stop",
            "beam" if self.beam else "greedy",
            drafted=self.drafted,
            accepted=self.accepted,
            verified=self.verified,
        )
        options = MatchOptions(**{"maskiou_mode": "analytic", "candidate_top_k": TOP_K, **self.options})
        record = Record(index, f"sample {index}", ("image.png",), 8, 8, self.truth)
        target = build_target(ids, GroundTruth(self.truth), vocab, options)
        return Matched(record, rollout, target, kept=len(ids) if self.cut else None, skipped=self.skipped)

    def stats(self) -> SampleStats:
        """Return what the learner counts: from the answer and its truth alone, and never from the counts above."""
        if self.bad:
            return SampleStats(bad=True)
        matched = self.matched()
        length = self.prompt + matched.target.train_len + END_OF_TURN
        return replace(sample_stats(matched, encoded_len=length), staleness=self.staleness)


@dataclass(frozen=True)
class Step:
    """The samples of a step, and sums of what was counted. seconds: of waiting for their answers."""

    all: Sequence[Sample]
    seconds: float = 2.0

    @property
    def samples(self) -> list[Sample]:
        """The samples that were not set aside."""
        return [one for one in self.all if not one.bad]

    @property
    def trained(self) -> list[Sample]:
        """Those of them that were trained on."""
        return [one for one in self.samples if not one.skipped]

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.samples)

    def __getattr__(self, name: str) -> float:
        """Return the sum of what was counted; of what training makes of an answer, in what was trained on."""
        if name not in {one.name for one in fields(Sample)} | {"true"}:
            raise AttributeError(name)
        samples = self.trained if name in OF_TRAINING else self.samples
        return sum(getattr(one, name) for one in samples)

    def having(self, condition: Callable[[Sample], bool]) -> int:
        """Return how many samples meet a condition."""
        return sum(map(condition, self.samples))


OF_TRAINING = {"following", "repeats", "removed", "penalised", "appended", "targets", "silent"}

TAIL_OF_DOG = f", {entry(2, DOG)}}}"
NOTHING_FOUND = {"appended": 1, "silent": 3, "tail": f", {entry(2, CAT)}}}"}
DYNAMIC = {"assignment": "dynamic"}

MATCHED = Sample(
    (CAT, DOG), begun(CAT, DOG) + "}", answered=2, found=2, close=2, overlap=2.0, below_gate=2, targets=8,
    prefix=begun(CAT, DOG), drafted=40, accepted=30, verified=(1, 0, 0, 0, 0, 0, 1, 0, 3),
)  # fmt: skip
BARELY = Sample((CAT,), begun(HALF) + "}", answered=1, found=1, overlap=0.4, targets=4, prefix=begun(HALF), staleness=2)
FOLLOWED = Sample(
    (CAT,), begun(FAR) + "}", DYNAMIC, answered=1, following=1, below_gate=1, targets=4, prefix=begun(FAR)
)
FOUND_AND_FOLLOWED = Sample(
    (CAT, DOG), begun(FAR, CAT, FAR) + "}", {**DYNAMIC, "unmatched_objects": "dropped"}, answered=3, found=1, close=1,
    overlap=1.0, following=1, below_gate=5, removed=1, targets=8, prefix=begun(FAR, CAT),
)  # fmt: skip
TINY = GTObject("fly", "bbox", (10, 10, 11, 11))  # has no pixel on the canvas, so it matches nothing, not even itself
TINY_FOLLOWED = Sample(
    (TINY,), begun(TINY) + "}", {**DYNAMIC, "maskiou_mode": "canvas"}, answered=1, following=1, below_gate=1, targets=4,
    prefix=begun(TINY),
)  # fmt: skip
NEUTRAL = Sample((CAT,), begun(FAR) + "}", answered=1, below_gate=1, prefix=begun(FAR), **NOTHING_FOUND)
PENALISED = replace(NEUTRAL, options={"unmatched_objects": "penalised"}, penalised=1)
MISSED = Sample(
    (CAT, DOG), begun(CAT) + "}", answered=1, found=1, close=1, overlap=1.0, below_gate=1, targets=4,
    prefix=begun(CAT), tail=TAIL_OF_DOG, appended=1, silent=3,
)  # fmt: skip
REPEATED = Sample(
    (CAT,), begun(CAT, CAT, CAT), {"duplicate_iou": 0.5}, answered=3, truncated=True, found=1, close=1, overlap=1.0,
    repeats=2, targets=4, prefix=begun(CAT), repeated=True,
)  # fmt: skip
BROKEN = Sample(
    (CAT,), begun(CAT) + ', "object_2": {"desc": "dog"}, "object_3": {"de', answered=1, broken=2, truncated=True,
    found=1, close=1, overlap=1.0, targets=4, prefix=begun(CAT) + ', "object_2": {"desc": "dog"}', at_limit=True,
)  # fmt: skip
SILENCE = Sample((CAT,), "", truncated=True, prefix="{", tail=f"{entry(1, CAT)}}}", appended=1, silent=3)
OUTLINE = Sample(
    (SQUARE,), begun(CAT) + "}", {"ot_epsilon": 0.5}, answered=1, found=1, close=1, overlap=1.0, targets=4,
    prefix=begun(CAT), beam=True,
)  # fmt: skip
OUTLINE_MISSED = Sample(
    (SQUARE,), begun(FAR) + "}", DYNAMIC, answered=1, below_gate=1, prefix=begun(FAR), appended=1, silent=3,
    tail=f", {entry(2, SQUARE)}}}",
)  # fmt: skip
EMPTY = Sample((), "{}", prefix="{")
EMPTY_AND_WRONG = Sample((), begun(FAR, DOG) + "}", answered=2, prefix=begun(FAR, DOG))
SKIPPED = replace(MISSED, skipped=True)
SKIPPED_FOLLOWER = replace(FOLLOWED, skipped=True)
CUT = replace(MISSED, cut=True)
BAD = Sample((CAT,), "", bad=True)

STEPS = {
    "matched": [MATCHED],
    "matched, barely": [BARELY],
    "followed": [FOLLOWED],
    "followed, at its very place": [TINY_FOLLOWED],
    "found and followed": [FOUND_AND_FOLLOWED],
    "unmatched": [NEUTRAL],
    "penalised": [PENALISED],
    "missed": [MISSED],
    "repeated": [REPEATED],
    "broken": [BROKEN],
    "no answer": [SILENCE],
    "an outline": [OUTLINE],
    "an outline, missed": [OUTLINE_MISSED],
    "empty truth": [EMPTY],
    "empty truth, wrong answer": [EMPTY_AND_WRONG],
    "skipped": [SKIPPED, SKIPPED_FOLLOWER],
    "cut": [CUT],
    "bad": [BAD],
    "no sample": [],
    "all of them": [
        MATCHED, BARELY, FOLLOWED, TINY_FOLLOWED, FOUND_AND_FOLLOWED, NEUTRAL, PENALISED, MISSED, REPEATED, BROKEN,
        SILENCE, OUTLINE, OUTLINE_MISSED, EMPTY, EMPTY_AND_WRONG, SKIPPED, CUT, BAD,
    ],
}  # fmt: skip
"""The samples of each hand-made step."""
