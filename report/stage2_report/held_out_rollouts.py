"""The held-out rollouts of a run as it wrote them down, scored as its evaluation scored them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stage2_report.run_history import events
from stage2_trainer.data.records import Record
from stage2_trainer.matching import GTObject
from stage2_trainer.scores.answer_scores import AnswerScores
from stage2_trainer.scores.answer_text import read_answer
from stage2_trainer.scores.scored_image import ScoredImage, scored_images
from stage2_trainer.telemetry.run_log import ROLLOUT_LOG

HELD_OUT, SAMPLE = b'{"event": "rollout", "part": "held-out"', b'{"event": "evaluation_sample"'
UNKNOWN_SIDE = 1000  # of an image, in records of runs that did not write it down


@dataclass(frozen=True)
class HeldOutRollout:
    """One held-out record with its answer."""

    record: Record
    text: str
    finish_reason: str | None

    @classmethod
    def of(cls, line: Mapping[str, Any], place: int) -> HeldOutRollout:
        """Return what a line of the run's records says. place: of the line, where it does not say the record's."""
        record = Record(
            index=line.get("record_index", place),
            sample_id=str(line["sample_id"]),
            images=(line["image"],) if line.get("image") else (),
            width=line.get("width") or UNKNOWN_SIDE,
            height=line.get("height") or UNKNOWN_SIDE,
            objects=tuple(GTObject(one["desc"], one["kind"], tuple(one["bins"])) for one in line["ground_truth"]),
            metadata=line.get("metadata", {}),
        )
        return cls(record, line["text"], line.get("finish_reason"))


@dataclass(frozen=True)
class EvaluatedStep:
    """The rollouts of one evaluation, by sample, in the order of the records."""

    step: int
    rollouts: Mapping[str, HeldOutRollout]

    @cached_property
    def images(self) -> dict[str, ScoredImage]:
        """The same as scores know them."""
        every = list(self.rollouts.values())
        answers = [read_answer(one.text, finish_reason=one.finish_reason) for one in every]
        return dict(zip(self.rollouts, scored_images([one.record for one in every], answers), strict=True))

    @cached_property
    def scores(self) -> AnswerScores:
        """Their scores."""
        return AnswerScores.of(list(self.images.values()))

    def within(self, whole: EvaluatedStep) -> EvaluatedStep:
        """Return these rollouts, judged by what is known of all records of another evaluation."""
        example = next(iter(whole.images.values()))
        found = EvaluatedStep(self.step, self.rollouts)
        found.__dict__["images"] = {
            name: replace(one, known=example.known, masks=example.masks) for name, one in self.images.items()
        }
        return found


def read_evaluations(
    log: Path, steps: Collection[int], samples: Collection[str] | None = None
) -> dict[int, EvaluatedStep]:
    """Return the evaluations of these steps that the run wrote down, perhaps of some samples alone.

    From its rollouts; where only the log is there, from the samples that this shows. Of one made again, the last.
    """
    found: dict[int, dict[str, HeldOutRollout]] = {}
    for place, line in enumerate(_lines(log)):
        if line["step"] in steps and (samples is None or str(line["sample_id"]) in samples):
            rollout = HeldOutRollout.of(line, place)
            found.setdefault(line["step"], {})[rollout.record.sample_id] = rollout
    return {step: EvaluatedStep(step, _ordered(found[step])) for step in sorted(found)}


def _ordered(rollouts: Mapping[str, HeldOutRollout]) -> dict[str, HeldOutRollout]:
    return dict(sorted(rollouts.items(), key=lambda pair: pair[1].record.index))


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    files = sorted(path for path in log.parent.glob(f"*{ROLLOUT_LOG}") if _has_held_out(path))
    for path in files:
        yield from events(path, HELD_OUT)
    if not files:
        yield from events(log, SAMPLE)


def _has_held_out(path: Path) -> bool:
    return next(events(path, HELD_OUT), None) is not None
