"""The segments of one optimizer step while its rollouts are still being made.

A thread encodes prompts while servers generate, and matches and encodes each rollout as soon as it is there; who trains
takes them by the places of their records, or as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import Any

from torch import nn

from stage2_trainer.data.encode import Prompt
from stage2_trainer.data.images import ImageError
from stage2_trainer.data.lazy import LazySequence
from stage2_trainer.data.records import Record
from stage2_trainer.learner.matcher import Matched
from stage2_trainer.learner.overlong import OverlongError
from stage2_trainer.learner.padding_free_batch import Segment
from stage2_trainer.rollouts.bad_samples import BadSample
from stage2_trainer.rollouts.rollout_source import GenerationRequest, PendingRollouts, RolloutBatch
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import FurtherAnswers, Outcome, Refused, Rollout

Chat = list[dict[str, Any]]
Made = tuple[Matched | BadSample, Segment]
SAMPLE_FAULTS = (ImageError, OverlongError)  # they say nothing of other samples
CHECK_S = 1.0  # how often a wait looks whether it shall end


@dataclass(frozen=True)
class SegmentWork:
    """The work on one record, done in a thread beside the learner's own.

    chat: its messages. encode: these to its prompt, without pixels. make: all of it to what is trained
    on. set_aside: a record with which something is wrong to what takes its place.
    """

    chat: Callable[[Record], Chat]
    encode: Callable[[Record, Chat, Stopwatch], Prompt]
    make: Callable[[Record, Prompt, Rollout, Stopwatch], tuple[Matched, Segment]]
    set_aside: Callable[[Record, Exception], tuple[BadSample, Segment]]


class StepSegments:
    """The segments of the raw batches of one optimizer step, which an EStep made.

    further: answers that are asked for beside the one that each record is trained on.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Record]],
        work: SegmentWork,
        thread: Executor,
        *,
        global_step: int,
        further: FurtherAnswers | None = None,
    ) -> None:
        self.batches = batches
        self.global_step = global_step
        self.records = [record for batch in batches for record in batch]
        self.stopwatch = Stopwatch()
        self.pending: PendingRollouts | None = None
        self.sync: SyncReport | None = None
        self._work = work
        self._further = further
        self._thread = thread
        self._prompts: dict[int, Future[Prompt]] = {}
        self._made: list[Future[Made]] = [Future() for _ in self.records]
        self._begun: set[int] = set()
        self._lock = Lock()

    def request(self, model: nn.Module, stopwatch: Stopwatch) -> GenerationRequest:
        """Return the request for all of the step's rollouts at once."""
        sizes = tuple(len(batch) for batch in self.batches)
        chats = LazySequence(len(self), self.chat)
        images = [record.images for record in self.records]
        return GenerationRequest(
            model,
            chats,
            self.global_step,
            0,
            stopwatch,
            on_rollout=self._arrived,
            sizes=sizes,
            images=images,
            further=self._further,
        )

    def indices(self, micro_step: int) -> range:
        """Return where a micro-step's records stand among those of the step."""
        ends = list(accumulate((len(batch) for batch in self.batches), initial=0))
        return range(ends[micro_step], ends[micro_step + 1])

    def __len__(self) -> int:
        return len(self.records)

    @property
    def all_in(self) -> bool:
        """Whether every rollout is there."""
        return self.pending is not None and self.pending.all_in

    def get(self, index: int, stopwatch: Stopwatch, check: Callable[[], None]) -> Segment:
        """Return a segment as soon as it is there; `check` is called now and then, and may raise.

        Raises:
            ServerError: servers were lost, and did not come back.
        """
        assert self.pending is not None, "the step was asked for"
        with stopwatch.measure("rollout_generate"):
            while not self.pending.wait_for([self._made[index]], patience_s=CHECK_S):
                check()
        return self._get(index)

    def as_they_come(self, stopwatch: Stopwatch, check: Callable[[], None]) -> Iterator[tuple[int, Segment]]:
        """Yield all segments with their places in the step, each as soon as it is there. Raises as `get`."""
        assert self.pending is not None, "the step was asked for"
        waited = dict(enumerate(self._made))
        while waited:
            with stopwatch.measure("rollout_generate"):
                while not self.pending.wait_for(list(waited.values()), patience_s=CHECK_S):
                    check()
            for index in [index for index, one in waited.items() if one.done()] or [next(iter(waited))]:
                del waited[index]
                yield index, self._get(index)

    def _get(self, index: int) -> Segment:
        """Return a segment whose rollout is there."""
        assert self.pending is not None, "the step was asked for"
        if self.pending.all_in:
            self._all_in(self.pending.result())
        matched, segment = self._made[index].result()
        if isinstance(matched, BadSample):
            return segment
        return segment.aged(self.global_step - matched.rollout.version)

    def matched(self) -> tuple[list[Matched | BadSample], RolloutBatch]:
        """Return what all rollouts were matched to, or were found to lack, in list order, and how they came to be."""
        assert self.pending is not None, "the step was asked for"
        batch = self.pending.result()
        self._all_in(batch)
        return [one.result()[0] for one in self._made], batch

    def chat(self, index: int) -> Chat:
        """Return the messages of a record; the first time they are encoded too, so that images are read once."""
        record = self.records[index]
        messages = self._work.chat(record)
        with self._lock:
            if index not in self._prompts:
                self._prompts[index] = self._thread.submit(self._work.encode, record, messages, self.stopwatch)
        return messages

    def _all_in(self, batch: RolloutBatch) -> None:
        """Begin the work on rollouts that came all at once."""
        for index, outcome in enumerate(batch.rollouts):
            self._arrived(index, outcome)

    def _arrived(self, index: int, outcome: Outcome) -> None:
        """Begin the work on what came of a request; the first of a record counts."""
        with self._lock:
            if index in self._begun:
                return
            self._begun.add(index)
        self._thread.submit(self._settle, index, outcome)

    def _settle(self, index: int, outcome: Outcome) -> None:
        future = self._made[index]
        try:
            future.set_result(self._outcome(index, outcome))
        except BaseException as error:  # noqa: BLE001  # it is raised where the segment is asked for
            future.set_exception(error)

    def _outcome(self, index: int, outcome: Outcome) -> Made:
        record = self.records[index]
        if isinstance(outcome, Refused):
            return self._work.set_aside(record, outcome.error)
        try:
            return self._work.make(record, self._prompt(index), outcome, self.stopwatch)
        except SAMPLE_FAULTS as error:
            return self._work.set_aside(record, error)

    def _prompt(self, index: int) -> Prompt:
        with self._lock:
            begun = self._prompts.pop(index, None)
        if begun is not None:
            return begun.result()  # it was submitted earlier, to this thread
        record = self.records[index]
        return self._work.encode(record, self._work.chat(record), self.stopwatch)
