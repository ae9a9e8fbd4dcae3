"""Samples that are set aside: logged, and counted over the whole run, up to `training.max_bad_samples`.

A run of a week meets a truncated image, an answer that fits no row, a prompt that a server does not accept. One of them
is no reason to end the run; many are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage2_api.errors import Problem
from stage2_trainer.data.images import ImageError, source_fault
from stage2_trainer.process.ranks import gathered, rank
from stage2_trainer.rollouts.errors import BadStepError, TooManyBadSamples
from stage2_trainer.telemetry.run_log import EventLog

logger = logging.getLogger(__name__)

KEY = "training.max_bad_samples"
FILE = "bad_samples.json"  # in a checkpoint
LAST = 3  # reasons in an error

Document = Mapping[str, Any]


@dataclass(frozen=True)
class BadSample:
    """An unusable sample, and why."""

    sample_id: str
    images: tuple[str, ...]
    error: Exception

    @classmethod
    def from_error(cls, sample_id: str, images: tuple[str, ...], error: Exception) -> BadSample:
        """Return a bad sample; an unreadable image is named by its file, not by the data that was sent."""
        named = source_fault(images) if isinstance(error, ImageError) else None
        return cls(sample_id, images, named or error)

    def document(self) -> dict[str, Any]:
        """Return its entry in the log."""
        image = next((one for one in self.images if not one.startswith("data:")), None)
        return {"sample_id": self.sample_id, "image": image, "reason": " ".join(str(self.error).split())}


class BadSamples:
    """The bad samples of a run, over all learner processes; each counts once, however many epochs meet it.

    most: a run with more ends; 0: the first one ends it.
    """

    def __init__(self, most: int, log: EventLog) -> None:
        self._most = most
        self._log = log
        self._noted: dict[tuple[str, str | None], Document] = {}
        self._lost: list[BadSample] = []

    @property
    def total(self) -> int:
        """The number of bad samples so far."""
        return len(self._noted)

    def note(self, found: Sequence[BadSample], *, step: int, of: int) -> None:
        """Note this process's bad samples among the `of` samples of the step. All processes must call it.

        Raises:
            TooManyBadSamples: there are too many in the run.
            BadStepError: the step has no other samples.
            Exception: the error of the first, where none is allowed.
        """
        documents = self._report(found, part="train", step=step)
        whole, bad = (sum(column) for column in zip(*gathered((of, len(found))), strict=True))
        self._judge(documents, step=step, of=whole, bad=bad)

    def lose(self, sample: BadSample) -> None:
        """Keep a sample that was lost when its row was laid out, for `note_lost`."""
        self._lost.append(sample)

    def note_lost(self, *, step: int, of: int, bad: int) -> None:
        """Note the samples that all processes have lost since the last call, when the step is complete.

        All processes must call it, with the samples of the step in all of them, and how many of these are bad. Raises
        as `note`.
        """
        lost, self._lost = self._lost, []
        self._judge(self._report(lost, part="train", step=step), step=step, of=of, bad=bad)

    def note_held_out(self, found: Sequence[BadSample], *, step: int, of: int) -> int:
        """Return how many of the `of` held-out samples an evaluation leaves out. All processes must call it.

        They do not count against the run's limit: each evaluation meets the same ones again.

        Raises:
            BadStepError: all of them are bad, so there is nothing to evaluate.
            Exception: the error of the first, where none is allowed.
        """
        documents = self._report(found, part="held-out", step=step)
        if documents and len(documents) >= of:
            raise BadStepError(f"all {of} held-out samples were set aside. {_reasons(documents)}")
        return len(documents)

    def save(self, checkpoint: Path, *, before: int) -> None:
        """Write the samples that steps before `before` set aside into a checkpoint's folder; the first process does."""
        noted = [one for one in self._noted.values() if one["step"] < before]
        if noted and rank() == 0:
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / FILE).write_text(json.dumps(noted, indent=1), encoding="utf-8")

    def load(self, checkpoint: Path) -> None:
        """Resume the count of a checkpoint."""
        saved = checkpoint / FILE
        noted = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else []
        self._noted = {_key(one): one for one in noted}

    def _judge(self, documents: Sequence[Document], *, step: int, of: int, bad: int) -> None:
        """End the run for new bad samples, if no others are left in the step, or if there are too many."""
        if documents and 1 < of <= bad:
            raise BadStepError(f"all {of} samples of step {step} were set aside. {_reasons(documents)}")
        if documents and self.total > self._most:
            rule = f"at most so many samples may be set aside, and {self.total} were in this run. {_reasons(documents)}"
            way_out = "mend the data, or raise it; the run goes on from its last checkpoint"
            raise TooManyBadSamples([Problem(KEY, self._most, rule, way_out)])

    def _report(self, found: Sequence[BadSample], *, part: str, step: int) -> list[Document]:
        """Log the bad samples of all processes, count those of training, and return one document for each."""
        mine: list[Document] = [{"part": part, "step": step, **one.document()} for one in found]
        for one in mine:
            logger.warning("sample %s is set aside (%s): %s", one["sample_id"], one["image"], one["reason"])
        everywhere = list({_key(one): one for share in gathered(mine) for one in share}.values())
        for one in everywhere:
            self._log.write("bad_sample", one)
        if part == "train":
            self._noted = {**{_key(one): one for one in everywhere}, **self._noted}
        if everywhere and self._most == 0:
            if found:
                raise found[0].error
            sample_id, reason = everywhere[0]["sample_id"], everywhere[0]["reason"]
            rule = f"a sample of another learner process is bad: {sample_id}: {reason}"
            raise TooManyBadSamples([Problem(KEY, 0, rule, "mend the data, or allow some")])
        return everywhere


def _key(document: Document) -> tuple[str, str | None]:
    """Return what is the same for a sample in all epochs. Ids may repeat in a data file."""
    return document["sample_id"], document["image"]


def _reasons(documents: Sequence[Document]) -> str:
    return "The last: " + "; ".join(f"{one['sample_id']}: {one['reason']}" for one in documents[-LAST:])
