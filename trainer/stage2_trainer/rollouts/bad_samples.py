"""Samples that are set aside: named in the log and counted over the whole run, up to `training.max_bad_samples`.

A run of a week meets a truncated image, an answer that fits no row, a prompt that a server does not accept. None of
them is a reason to end the run; many of them are.
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
FILE = "bad_samples.json"
"""The samples that were set aside, in a checkpoint."""
EVENT = "bad_sample"
LAST = 3

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
    """The bad samples of a run, over all learner processes. most: more than these end the run; 0: the first does.

    A sample that comes again in the next epoch counts once.
    """

    def __init__(self, most: int, log: EventLog) -> None:
        self._most = most
        self._log = log
        self._noted: dict[str, Document] = {}
        self._late: list[BadSample] = []

    @property
    def total(self) -> int:
        """The number of samples of the run that were set aside so far."""
        return len(self._noted)

    def note(self, found: Sequence[BadSample], *, step: int, of: int) -> None:
        """Note this process's bad samples among the `of` whose rollouts the step made. All processes must call it.

        Raises:
            TooManyBadSamples: there are too many in the run.
            BadStepError: the step has no other samples.
            Exception: the error of the first, where none is allowed.
        """
        late, self._late = self._late, []
        documents = self._report([*late, *found], part="train", step=step)
        self._noted = {**{one["sample_id"]: one for one in documents}, **self._noted}
        whole, bad = (sum(column) for column in zip(*gathered((of, len(found))), strict=True))
        if 1 < whole <= bad:
            raise BadStepError(f"all {whole} samples of step {step} were set aside. {_reasons(documents)}")
        if self.total > self._most:
            rule = f"at most so many samples may be set aside, and {self.total} were in this run. {_reasons(documents)}"
            way_out = "mend the data, or raise it; the run goes on from its last checkpoint"
            raise TooManyBadSamples([Problem(KEY, self._most, rule, way_out)])

    def note_late(self, bad: BadSample) -> None:
        """Keep a sample whose row could not be laid out, for the next `note`, which all processes call."""
        self._late.append(bad)

    def note_held_out(self, found: Sequence[BadSample], *, step: int, of: int) -> int:
        """Return how many of the `of` held-out samples an evaluation leaves out. All processes must call it.

        They do not count against the run's limit: each evaluation meets the same ones again.

        Raises:
            BadStepError: there are no others, so that its figures would mean nothing.
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
        self._noted = {one["sample_id"]: one for one in noted}

    def _report(self, found: Sequence[BadSample], *, part: str, step: int) -> list[Document]:
        """Log the bad samples of all processes, and return one document for each."""
        mine: list[Document] = [{"part": part, "step": step, **one.document()} for one in found]
        for one in mine:
            logger.warning("sample %s is set aside (%s): %s", one["sample_id"], one["image"], one["reason"])
        everywhere = list({one["sample_id"]: one for share in gathered(mine) for one in share}.values())
        for one in everywhere:
            self._log.write(EVENT, one)
        if everywhere and self._most == 0:
            raise found[0].error if found else TooManyBadSamples([_first_of_another(everywhere[0])])
        return everywhere


def _reasons(documents: Sequence[Document]) -> str:
    return "The last: " + "; ".join(f"{one['sample_id']}: {one['reason']}" for one in documents[-LAST:])


def _first_of_another(document: Document) -> Problem:
    rule = f"a sample of another learner process is bad: {document['sample_id']}: {document['reason']}"
    return Problem(KEY, 0, rule, "mend the data, or allow some")
