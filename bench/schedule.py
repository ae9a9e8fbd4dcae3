"""An optimizer step of an 8B on H100s under several schedules, against the least time that its parts allow.

Servers that only take time (`slow_servers`) get requests from the learner's own client, and the learner's own loop
(`timed_learner`) trains, its forward and backward passes being sleeps. The bound of a step is what the servers need for
its requests, or the learner for its tokens, whichever is more; everything else is the schedule's loss: waiting for one
another, the optimizer, the weight sync.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench import slow_servers
from bench.slow_servers import MAX_RUNNING, MOST_TOKENS, PROMPT_TOKENS, SCALE, answer_tokens, arrivals
from bench.timed_learner import (
    BACKWARD_TOKENS_PER_S,
    CHAT,
    FORWARD_TOKENS_PER_S,
    OPTIMIZER_S,
    ROW_TOKENS,
    SYNC_S,
    Gpus,
    TimedLearner,
    pause,
    rollouts_of,
    steps_of,
    tokens_of,
)

from stage2_api.rollout_matching import RepeatTerminate
from stage2_trainer.packing import HalvedRows
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.rollout_source import contiguous_chunks
from stage2_trainer.wire.requests import RepetitionDetection, RolloutRequest, Sampling, SeedPlan, answers

SEED = 17
STEPS, PIPELINED_STEPS, PEER_STEPS = 12, 4, 2  # more where a step's ratio depends more on the lengths of its answers
MANY_STEPS = 40  # of the model alone
ASKED_ALONE = 4  # rollouts that are enough to time the asking of one at a time; the step is that many times as long
LOOPS = RepetitionDetection.from_rules(RepeatTerminate(enabled=True))


@dataclass(frozen=True)
class Job:
    """A layout: servers, learner GPUs, and the records of an optimizer step."""

    name: str
    servers: int
    learners: int
    records: int

    @property
    def gpus(self) -> Gpus:
        """The learner's GPUs."""
        return Gpus(self.learners)

    def plan(self, step: int) -> SeedPlan:
        """Return the seeds of a step's requests: one record is a micro-step."""
        return SeedPlan(SEED, step, 0, (1,) * self.records)

    def answers(self, step: int, *, cut: bool) -> list[int]:
        """Return the tokens of a step's answers."""
        plan = self.plan(step)
        cut_at = LOOPS.max_pattern_size * LOOPS.min_count if cut and LOOPS else None
        return [answer_tokens(plan.seed(i), MOST_TOKENS, cut_at=cut_at)[0] for i in range(self.records)]

    def arrivals(self, answers: Sequence[int]) -> list[float]:
        """Return when the servers have these answers, all requested at once."""
        chunks = contiguous_chunks(self.records, self.servers)
        return [when for start, end in chunks for when in arrivals(answers[start:end])]

    def bound_s(self, step: int, *, cut: bool) -> float:
        """Return the least seconds of a step: all servers side by side, or the learner, whichever takes longer."""
        answers = self.answers(step, cut=cut)
        return max(*self.arrivals(answers), self.gpus.train_s(sum(sequences(answers))))


def sequences(answers: Sequence[int]) -> list[int]:
    """Return the tokens of what is trained on."""
    return [PROMPT_TOKENS + tokens for tokens in answers]


JOBS = (Job("job-3v1", 3, 1, 32), Job("6 + 2", 6, 2, 64))


Schedule = Callable[[ServerBackend, Job, Sequence[int]], Iterator[float]]
"""Runs these steps and yields the seconds of each."""


def since(start: float) -> float:
    """Return the model's seconds that have passed."""
    return (time.monotonic() - start) * SCALE


def one_at_a_time(backend: ServerBackend, job: Job, steps: Sequence[int]) -> Iterator[float]:
    """Ask for one rollout, train on it, ask for the next."""
    for step in steps:
        start, plan = time.monotonic(), job.plan(step)
        for index in range(ASKED_ALONE):
            alone = SeedPlan(SEED, step, plan.position(index)[0])
            (rollout,) = answers(backend.generate([RolloutRequest(CHAT)], seed_plan=alone))
            pause(job.gpus.train_s(tokens_of(rollout)))
        yield since(start) * job.records / ASKED_ALONE + OPTIMIZER_S + SYNC_S


def all_then_train(backend: ServerBackend, job: Job, steps: Sequence[int]) -> Iterator[float]:
    """Ask for all rollouts of a step, and train when the last one is there."""
    for step in steps:
        start = time.monotonic()
        rollouts = answers(backend.generate([RolloutRequest(CHAT)] * job.records, seed_plan=job.plan(step)))
        pause(job.gpus.train_s(sum(map(tokens_of, rollouts))) + OPTIMIZER_S + SYNC_S)
        yield since(start)


def whole_step(backend: ServerBackend, job: Job, steps: Sequence[int]) -> Iterator[float]:
    """Ask for all rollouts of a step, and train on rows as they fill."""
    yield from steps_of(TimedLearner(rollouts_of(backend, SEED), job.gpus, job.records), steps)


def pipelined(backend: ServerBackend, job: Job, steps: Sequence[int]) -> Iterator[float]:
    """Ask for the next step while this one trains; the first step of a run, which waits for its own, is not counted."""
    learner = TimedLearner(rollouts_of(backend, SEED), job.gpus, job.records, pipelined=True)
    learner.step(steps[0] - 1)
    yield from steps_of(learner, steps)


Expected = Callable[[Job, int, bool], float]
"""The seconds of a step, by the model alone: job, step, and whether loops are cut."""


def expected_alone(job: Job, step: int, cut: bool) -> float:
    """Return the step of `one_at_a_time`."""
    answers = job.answers(step, cut=cut)
    generate = sum(arrivals([tokens])[0] for tokens in answers)
    return generate + job.gpus.train_s(sum(sequences(answers))) + OPTIMIZER_S + SYNC_S


def expected_after(job: Job, step: int, cut: bool) -> float:
    """Return the step of `all_then_train`."""
    answers = job.answers(step, cut=cut)
    return max(job.arrivals(answers)) + job.gpus.train_s(sum(sequences(answers))) + OPTIMIZER_S + SYNC_S


def expected_whole(job: Job, step: int, cut: bool) -> float:
    """Return the step of `whole_step`: rows that are known before the last answer train at once, the others after."""
    answers = job.answers(step, cut=cut)
    arrived, lengths = job.arrivals(answers), sequences(answers)
    planned, now, last = HalvedRows(ROW_TOKENS, len(lengths)), 0.0, max(arrived)
    left = sum(lengths)
    for index in sorted(range(len(lengths)), key=arrived.__getitem__):
        for row in planned.add(index, lengths[index]):
            tokens = sum(lengths[i] for i in row)
            now = max(now, arrived[index])
            if now < last:
                now += job.gpus.early_s(tokens)
                left -= tokens
    return max(now, last) + job.gpus.train_s(left) + OPTIMIZER_S + SYNC_S


def expected_pipelined(job: Job, step: int, cut: bool) -> float:
    """Return the step of `pipelined`: what was generated before is trained on while this one generates."""
    before, now = job.answers(step - 1, cut=cut), job.answers(step, cut=cut)
    return max(*job.arrivals(now), job.gpus.train_s(sum(sequences(before))) + OPTIMIZER_S) + SYNC_S


@dataclass(frozen=True)
class Measured:
    """A schedule that is measured: its name, whether loops are cut, and how many steps are enough."""

    name: str
    schedule: Schedule
    expected: Expected
    cut: bool
    steps: int = STEPS

    def row(self, job: Job) -> str:
        """Run it, and return its line of the table."""
        steps = range(1, 1 + self.steps)
        with backend_of(job, cut=self.cut) as backend:
            seconds = list(self.schedule(backend, job, steps))
        bound, least = sum(job.bound_s(step, cut=self.cut) for step in steps), self.ratio(job, steps)
        cells = (job.name, self.name, *(f"{one / self.steps:.1f}" for one in (sum(seconds), bound)))
        ratios = (sum(seconds) / bound, least, self.ratio(job, range(1, 1 + MANY_STEPS)))
        return f"| {' | '.join((*cells, *(f'{one:.2f}' for one in ratios)))} |\n"

    def ratio(self, job: Job, steps: Sequence[int]) -> float:
        """Return the steps' time by the model alone, over their bound."""
        expected = sum(self.expected(job, step, self.cut) for step in steps)
        return expected / sum(job.bound_s(step, cut=self.cut) for step in steps)


SCHEDULES = (
    Measured("one rollout at a time (stage2 0.1.0)", one_at_a_time, expected_alone, cut=False, steps=1),
    Measured("generate all, then train (ms-swift, TRL)", all_then_train, expected_after, cut=False, steps=PEER_STEPS),
    Measured("the same, loops cut", all_then_train, expected_after, cut=True, steps=PEER_STEPS),
    Measured("whole step, rows as they fill", whole_step, expected_whole, cut=True),
    Measured("pipelined", pipelined, expected_pipelined, cut=True, steps=PIPELINED_STEPS),
)


@dataclass(frozen=True)
class ScheduleTable:
    """The table of all schedules; `title` as the other benchmarks' tables have one."""

    title: str

    def lines(self) -> Iterator[str]:
        """The table's lines; each row is measured when it is read."""
        yield f"\n## {self.title}\n\n{model_in_words()}\n\n"
        yield "| job | schedule | step s | bound s | step / bound | by the model | 40 steps |\n"
        yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
        for job in JOBS:
            for measured in SCHEDULES:
                yield measured.row(job)


def model_in_words() -> str:
    """Return what the seconds mean."""
    servers = slow_servers
    layouts = "; ".join(
        f"{job.name}: {job.servers} servers, {job.learners} learner GPUs, {job.records} records a step" for job in JOBS
    )
    return (
        f"Model: prompts of {PROMPT_TOKENS:,} tokens read at {servers.PREFILL_TOKENS_PER_S:,.0f} tokens/s, then "
        f"{1e3 * servers.STEP_S:g} ms a token and {1e6 * servers.STEP_S_PER_ANSWER:g} us more for each answer of the "
        f"batch, at most {servers.MAX_RUNNING} at once; answers lognormal, mean {servers.MEAN_TOKENS:,.0f}, sigma "
        f"{servers.SIGMA:g}, {servers.LOOPS:.0%} loops to {MOST_TOKENS:,} tokens, or cut 128 tokens after they begin.\n"
        f"Forward {FORWARD_TOKENS_PER_S:,.0f}, backward {BACKWARD_TOKENS_PER_S:,.0f} tokens/s a GPU, rows of "
        f"{ROW_TOKENS:,} tokens, optimizer {OPTIMIZER_S:g} s, sync {SYNC_S:g} s.\n{layouts}.\n"
        f"All times are divided by {SCALE:g} while it runs and shown undivided. Bound: the servers side by side, with "
        "the same chunks and nothing to wait for, or the learner, whichever takes longer. Client, pipeline, rows and "
        "their order are the learner's own; servers and passes sleep. A row that trains before the last answer is "
        "there takes one more backward pass. One rollout at a time: a share of the step is asked for, and its time "
        f"extended. Measured: {STEPS} steps, {PIPELINED_STEPS} pipelined, {PEER_STEPS} of others; what the code takes "
        f"counts {SCALE:g} times. By the model: the ratio where it takes nothing, for the same steps and {MANY_STEPS}."
    )


@contextmanager
def backend_of(job: Job, *, cut: bool, at_once: int = MAX_RUNNING) -> Iterator[ServerBackend]:
    """Start a job's servers, and return their client, which asks each for so many answers at once."""
    command = [sys.executable, "-m", "bench.slow_servers", str(job.servers)]
    servers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert servers.stdout is not None
        urls = [f"http://127.0.0.1:{port}" for port in servers.stdout.readline().split()]
        sampling = Sampling(MOST_TOKENS, repetition=LOOPS if cut else None)
        with ServerBackend(urls, token="t", sampling=sampling, timeout_s=600, in_flight=at_once) as backend:
            yield backend
    finally:
        servers.terminate()
        servers.wait()


TABLE = ScheduleTable("A step of an 8B on H100s, by schedule")
