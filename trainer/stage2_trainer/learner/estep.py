"""The E-step, as in EM: all rollouts of an optimizer step are requested at once and become segments as they arrive.

A thread encodes prompts while servers generate, and matches and encodes each answer as soon as it arrives. The M-step
(`step`) trains on the segments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any

from stage2_trainer.data.encode import Prompt
from stage2_trainer.data.records import Record
from stage2_trainer.learner.padding_free_batch import Segment
from stage2_trainer.learner.supervise import SAMPLE_FAULTS, Chat, Matched, Supervised, Supervisor, with_origin
from stage2_trainer.process.ranks import rank, world_size
from stage2_trainer.rollouts.bad_samples import BadSample
from stage2_trainer.rollouts.rollout_source import Answers, GenerationRequest, LazySequence, RolloutSource
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import Outcome, Refused

CHECK_S = 1.0  # seconds between two checks for an interrupt while the learner waits
_PHASES = 2**16

RawBatches = Sequence[Sequence[Record]]


@dataclass(frozen=True)
class Teaching:
    """One way to teach the records of a step: the source of answers, and the supervision by them.

    on_matched: receives the matched samples of each step.
    """

    rollouts: RolloutSource
    supervisor: Supervisor
    on_matched: Callable[[int, Sequence[Matched]], None] = lambda step, matched: None


@dataclass(frozen=True)
class GroundTruthSteps:
    """The optimizer steps of a mixed run that train on the ground truth: a share of all, spread evenly.

    They follow from the run's seed and the step's number alone, so a resumed run has the same ones.
    """

    share: float
    seed: int

    def before(self, step: int) -> int:
        """Return how many of the steps before this one, counted from 0, train on the ground truth."""
        phase = Fraction(random.Random(f"supervised {self.seed}").randrange(_PHASES), _PHASES)
        return math.floor(step * Fraction(self.share) + phase)

    def __contains__(self, step: int) -> bool:
        return self.before(step + 1) > self.before(step)


class EStep:
    """The E-step of a run that trains `model`.

    check: called while the learner waits for answers; it may raise. truth: teaches the `truth_steps` of a mixed run.
    shared: all learner processes pass the same raw batches, and each teaches its share (`StepAnswers.collect`).
    """

    def __init__(
        self,
        model: Any,
        teaching: Teaching,
        *,
        check: Callable[[], None] = lambda: None,
        truth: Teaching | None = None,
        truth_steps: GroundTruthSteps | None = None,
        shared: bool = False,
    ) -> None:
        self._model = model
        self._shared = shared
        self._teaching = teaching
        self._check = check
        self._truth = truth
        self._truth_steps = truth_steps
        self._thread = ThreadPoolExecutor(1, "encode")
        self._ahead: StepAnswers | None = None

    def sync_and_request(
        self, batches: RawBatches, following: RawBatches = (), *, global_step: int, stopwatch: Stopwatch
    ) -> StepAnswers:
        """Sync, and request the rollouts of a step.

        With a pipeline a step's rollouts were requested one step ahead, and come from the weights before: wait for
        them, push the new weights, and request the rollouts of the `following` step.

        Raises:
            ServerError: servers were lost, and did not come back.
        """
        ahead, self._ahead = self._ahead, None
        step = ahead if ahead is not None and ahead.global_step == global_step else self._step(batches, global_step)
        step.sync(stopwatch)
        if step is not ahead:
            step.ask(stopwatch)
        if following:
            self._ahead = self._step(following, global_step + 1)
            self._ahead.ask(Stopwatch())
        return step

    def placeholder(self, sample_id: str) -> Segment:
        """Return a segment without a loss, in the place of one whose pixels are lost."""
        return self._teaching.supervisor.placeholder(sample_id)

    def _step(self, batches: RawBatches, global_step: int) -> StepAnswers:
        from_truth = self._truth_steps is not None and global_step in self._truth_steps
        teaching = self._truth if from_truth and self._truth is not None else self._teaching
        return StepAnswers(
            batches,
            teaching,
            self._thread,
            model=self._model,
            global_step=global_step,
            check=self._check,
            shared=self._shared,
        )


class StepAnswers:
    """The answers to one optimizer step's raw batches, which become segments while servers generate the rest.

    stopwatch: measures the learner's waits, for the step that trains on the segments. report: the sync before the
    rollouts; None = the weights had not moved. shared: this process teaches its share of the records; `collect` brings
    the segments together.
    """

    def __init__(
        self,
        batches: RawBatches,
        teaching: Teaching,
        thread: Executor,
        *,
        model: Any,
        global_step: int,
        check: Callable[[], None] = lambda: None,
        shared: bool = False,
    ) -> None:
        self.global_step = global_step
        self.stopwatch = Stopwatch()
        self.report: SyncReport | None = None
        self._sizes = tuple(len(batch) for batch in batches)
        self._records = [record for batch in batches for record in batch]
        self._teaching = teaching
        self._supervisor = teaching.supervisor
        self._thread = thread
        self._model = model
        self._check = check
        self._answers: Answers
        self._thread_stopwatch = Stopwatch()
        self._prompts: dict[int, Future[Prompt]] = {}
        self._segments: list[Future[Supervised]] = [Future() for _ in self._records]
        self._own = range(rank(), len(self._records), world_size()) if shared else range(len(self._records))
        self._collected: dict[int, Segment] = {}
        self._finished = False
        self._arrived: set[int] = set()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def all_arrived(self) -> bool:
        """Whether every rollout has arrived."""
        return self._answers.all_arrived

    def sync(self, stopwatch: Stopwatch) -> None:
        """Push the weights if they moved; the step that trains on the segments begins."""
        self.stopwatch = stopwatch
        self.report = self._teaching.rollouts.sync(self._model, global_step=self.global_step, stopwatch=stopwatch)

    def ask(self, stopwatch: Stopwatch) -> None:
        """Request all rollouts of the step at once."""
        request = GenerationRequest(
            self._model,
            LazySequence(len(self), self._chat),
            self.global_step,
            0,
            stopwatch,
            on_rollout=self._receive,
            sizes=self._sizes,
            images=[record.images for record in self._records],
            expected=[record.answer_length for record in self._records],
        )
        self._answers = self._teaching.rollouts.ask(request)

    def own_segments(self) -> list[tuple[int, Segment]]:
        """Return the segments of this process's share, with their places, once all rollouts have arrived.

        Raises as `micro_steps`, except for bad samples.
        """
        for index in self._own:
            self._wait(self._segments[index])
        with self.stopwatch.measure("rollout_generate"):
            self._answers.result()
        return [(index, self._segment(index)) for index in self._own]

    def collect(self, shares: Sequence[Sequence[tuple[int, Segment]]]) -> None:
        """Take the segments of all processes, and note bad samples in all of them, which may raise.

        shares: of the processes; none where others plan the rows.
        """
        self._collected = {index: segment for share in shares for index, segment in share}
        self._finish()

    def micro_steps(self) -> Iterator[list[Segment]]:
        """Yield the segments of each raw batch, in order, as soon as all of them have arrived.

        Before the last batch, bad samples are noted in all processes, which may raise.

        Raises:
            ServerError: servers were lost, and did not come back.
            TooManyBadSamples, BadStepError, Exception: as `BadSamples.note`.
        """
        for start, end in pairwise(accumulate(self._sizes, initial=0)):
            segments = []
            for index in range(start, end):
                self._wait(self._segments[index])
                segments.append(self._segment(index))
            if end == len(self):
                self._finish()
            yield segments

    def as_they_come(self) -> Iterator[tuple[int, Segment]]:
        """Yield all segments with their places in the step, each as soon as it is encoded. Raises as `micro_steps`."""
        left = dict.fromkeys(range(len(self)))
        encoded = _Done(self._segments)
        while left:
            self._wait(encoded.next)
            # if all rollouts have arrived and none is encoded yet, block on the first
            for index in [index for index in encoded.take() if index in left] or [next(iter(left))]:
                del left[index]
                yield index, self._segment(index)
        self._finish()

    def _wait(self, segment: Future[Any]) -> None:
        """Wait until this segment is encoded, or all rollouts have arrived."""
        with self.stopwatch.measure("rollout_generate"):
            while not self._answers.wait_for([segment], patience_s=CHECK_S):
                self._check()

    def _segment(self, index: int) -> Segment:
        if index in self._collected:
            return self._collected[index]
        if self._answers.all_arrived and len(self._arrived) < len(self):
            self._receive_all()
        matched, segment = self._segments[index].result()
        if isinstance(matched, BadSample):
            return segment
        return segment.aged(self.global_step - matched.rollout.version)

    def _finish(self) -> None:
        """Note bad samples and report the matched ones, now that all rollouts have arrived."""
        if self._finished:
            return
        self._finished, batch = True, self._answers.result()
        samples = {index: self._segments[index].result()[0] for index in self._own}
        bad = [one for one in samples.values() if isinstance(one, BadSample)]
        tools = self._supervisor.tools
        tools.bad.note(bad, step=self.global_step, of=len(samples))
        self._teaching.on_matched(self.global_step, with_origin(samples, batch, tools.matcher.options))
        self.report = batch.sync or self.report
        self.stopwatch.add(self._thread_stopwatch)

    def _chat(self, index: int) -> Chat:
        """Return the messages of a record; at the first call the thread encodes them, so that images are read once."""
        record = self._records[index]
        messages = self._supervisor.chat(record)
        with self._lock:
            if index in self._own and index not in self._prompts:
                self._prompts[index] = self._thread.submit(
                    self._supervisor.prompt, record, messages, self._thread_stopwatch
                )
        return messages

    def _receive_all(self) -> None:
        """Receive all rollouts of a source in this process: they arrive together, without `on_rollout`."""
        for index, outcome in enumerate(self._answers.result().rollouts):
            self._receive(index, outcome)

    def _receive(self, index: int, outcome: Outcome) -> None:
        """Let the thread work on an outcome; only the first one of a record counts."""
        with self._lock:
            if index in self._arrived:
                return
            self._arrived.add(index)
        if index in self._own:
            self._thread.submit(self._settle, index, outcome)

    def _settle(self, index: int, outcome: Outcome) -> None:
        future = self._segments[index]
        try:
            future.set_result(self._supervise(index, outcome))
        except BaseException as error:  # noqa: BLE001  # raised where the segment is needed
            future.set_exception(error)

    def _supervise(self, index: int, outcome: Outcome) -> Supervised:
        record = self._records[index]
        if isinstance(outcome, Refused):
            return self._supervisor.set_aside(record, outcome.error)
        try:
            return self._supervisor.supervise(record, self._prompt(index), outcome, self._thread_stopwatch)
        except SAMPLE_FAULTS as error:
            return self._supervisor.set_aside(record, error)

    def _prompt(self, index: int) -> Prompt:
        with self._lock:
            encoded = self._prompts.pop(index, None)
        if encoded is not None:
            return encoded.result()  # this thread has encoded it before
        record = self._records[index]
        return self._supervisor.prompt(record, self._supervisor.chat(record), self._thread_stopwatch)


class _Done:
    """The futures of a list that are done, by number; finding the next costs the same however many there are.

    next: done as soon as one is that `take` has not returned.
    """

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self.next: Future[None] = Future()
        self._lock = Lock()
        self._numbers: list[int] = []
        for number, future in enumerate(futures):
            future.add_done_callback(partial(self._note, number))

    def take(self) -> list[int]:
        """Return those that are done since the last call, in rising order."""
        with self._lock:
            numbers, self._numbers = self._numbers, []
            self.next = Future()
        return sorted(numbers)

    def _note(self, number: int, future: Future[Any]) -> None:
        with self._lock:
            self._numbers.append(number)
            if not self.next.done():
                self.next.set_result(None)
