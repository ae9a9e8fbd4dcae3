"""An optimizer step of an 8B on H100s under several schedules, against the least time that its parts allow.

Servers that only take time (`slow_servers`) are asked by the learner's own client; the learner's forward and backward
passes are sleeps. The bound of a step is what the servers need for its requests, or the learner for its tokens,
whichever is more; everything else is the schedule's loss: waiting for one another, the optimizer, the weight sync.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from bench import slow_servers
from bench.slow_servers import PROMPT_TOKENS, SCALE, answer_tokens, arrivals

from stage2_api.rollout_matching import RepeatTerminate
from stage2_trainer.rollouts.chunks import contiguous_chunks
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.repetition import RepetitionDetection
from stage2_trainer.wire.rollout import Rollout, RolloutRequest, Sampling
from stage2_trainer.wire.seeds import SeedPlan

SEED = 17
ROW_TOKENS = 12_000
FORWARD_TOKENS_PER_S, BACKWARD_TOKENS_PER_S = 21_000.0, 10_500.0  # LoRA, gradient checkpointing, one learner GPU
OPTIMIZER_S = 0.3
SYNC_S = 0.6  # an adapter of 45 MB, merged by the servers
MOST_TOKENS = 8_192
STEPS = 3
ASKED_ALONE = 8  # rollouts that are enough to time the asking of one at a time; the step is that many times as long
LOOPS = RepetitionDetection.from_rules(RepeatTerminate(enabled=True))
CHAT = [{"role": "user", "content": "List the objects."}]


@dataclass(frozen=True)
class Job:
    """A layout: servers, learner GPUs, and the records of an optimizer step."""

    name: str
    servers: int
    learners: int
    records: int

    def train_s(self, tokens: int) -> float:
        """Return the seconds of forward and backward over so many tokens."""
        return tokens * (1 / FORWARD_TOKENS_PER_S + 1 / BACKWARD_TOKENS_PER_S) / self.learners

    def answers(self, step: int, *, cut: bool) -> list[int]:
        """Return the tokens of a step's answers."""
        plan = SeedPlan(SEED, step, 0)
        cut_at = LOOPS.max_pattern_size * LOOPS.min_count if cut and LOOPS else None
        return [answer_tokens(plan.seed(i), MOST_TOKENS, cut_at=cut_at)[0] for i in range(self.records)]

    def arrivals(self, answers: Sequence[int]) -> list[float]:
        """Return when the servers have these answers, asked for at once."""
        chunks = contiguous_chunks(self.records, self.servers)
        return [when for start, end in chunks for when in arrivals(answers[start:end])]

    def bound_s(self, step: int, *, cut: bool) -> float:
        """Return the least seconds of a step: all servers side by side, or the learner, whichever takes longer."""
        answers = self.answers(step, cut=cut)
        return max(*self.arrivals(answers), self.train_s(sum(sequences(answers))))


def sequences(answers: Sequence[int]) -> list[int]:
    """Return the tokens of what is trained on."""
    return [PROMPT_TOKENS + tokens for tokens in answers]


JOBS = (Job("job-3v1", 3, 1, 32), Job("6 + 2", 6, 2, 64))


class Asked:
    """The rollouts of one step, asked for at once; each can be had as soon as it is there."""

    def __init__(self, backend: ServerBackend, job: Job, step: int) -> None:
        self._arrived: list[Future[Rollout]] = [Future() for _ in range(job.records)]
        requests = [RolloutRequest(CHAT)] * job.records
        plan = SeedPlan(SEED, step, 0)
        self._all = in_background(backend.generate, requests, seed_plan=plan, on_rollout=self._take)

    def _take(self, index: int, rollout: Rollout) -> None:
        self._arrived[index].set_result(rollout)

    def in_order(self) -> Iterator[int]:
        """Yield the tokens of each sequence, in the order of the records, each as soon as it can be."""
        for one in self._arrived:
            yield tokens_of(one.result())

    def wait(self) -> list[int]:
        """Return the tokens of all sequences when all are there."""
        return [tokens_of(rollout) for rollout in self._all.result()]


def tokens_of(rollout: Rollout) -> int:
    """Return the length of a sequence that is trained on."""
    return len(rollout.prompt_token_ids) + len(rollout.token_ids)


def pause(seconds: float) -> None:
    """Let the model's seconds pass."""
    time.sleep(seconds / SCALE)


def rows(lengths: Iterator[int]) -> Iterator[int]:
    """Yield the tokens of each row, as soon as the next sequence does not fit into it."""
    filled = 0
    for length in lengths:
        if filled + length > ROW_TOKENS:
            yield filled
            filled = 0
        filled += length
    yield filled


def train(job: Job, lengths: Iterator[int]) -> None:
    """Train on rows as they fill."""
    for tokens in rows(lengths):
        pause(job.train_s(tokens))


Schedule = Callable[[ServerBackend, Job, Sequence[int]], Iterator[float]]
"""Runs these steps and yields the seconds of each."""


def since(start: float) -> float:
    """Return the model's seconds that have passed."""
    return (time.monotonic() - start) * SCALE


def one_at_a_time(backend: ServerBackend, job: Job, steps: Sequence[int]) -> Iterator[float]:
    """Ask for one rollout, train on it, ask for the next."""
    for step in steps:
        start = time.monotonic()
        for micro_step in range(ASKED_ALONE):
            (rollout,) = backend.generate([RolloutRequest(CHAT)], seed_plan=SeedPlan(SEED, step, micro_step))
            pause(job.train_s(tokens_of(rollout)))
        yield since(start) * job.records / ASKED_ALONE + OPTIMIZER_S + SYNC_S


def all_then_train(backend: ServerBackend, job: Job, steps: Sequence[int]) -> Iterator[float]:
    """Ask for all rollouts of a step, and train when the last one is there."""
    for step in steps:
        start = time.monotonic()
        train(job, iter(Asked(backend, job, step).wait()))
        pause(OPTIMIZER_S + SYNC_S)
        yield since(start)


def whole_step(backend: ServerBackend, job: Job, steps: Sequence[int]) -> Iterator[float]:
    """Ask for all rollouts of a step, and train on rows as they fill."""
    for step in steps:
        start = time.monotonic()
        asked = Asked(backend, job, step)
        train(job, asked.in_order())
        pause(OPTIMIZER_S)
        asked.wait()
        pause(SYNC_S)
        yield since(start)


def pipelined(backend: ServerBackend, job: Job, steps: Sequence[int]) -> Iterator[float]:
    """Ask for the next step while this one trains; nothing is under way while weights are synced."""
    asked = Asked(backend, job, steps[0] - 1)
    asked.wait()
    for step in steps:
        start = time.monotonic()
        current, asked = asked, Asked(backend, job, step)
        train(job, current.in_order())
        pause(OPTIMIZER_S)
        asked.wait()
        pause(SYNC_S)
        yield since(start)


Expected = Callable[[Job, int, bool], float]
"""The seconds of a step, by the model alone: job, step, and whether loops are cut."""


def expected_alone(job: Job, step: int, cut: bool) -> float:
    """Return the step of `one_at_a_time`."""
    answers = job.answers(step, cut=cut)
    generate = sum(arrivals([tokens])[0] for tokens in answers)
    return generate + job.train_s(sum(sequences(answers))) + OPTIMIZER_S + SYNC_S


def expected_after(job: Job, step: int, cut: bool) -> float:
    """Return the step of `all_then_train`."""
    answers = job.answers(step, cut=cut)
    return max(job.arrivals(answers)) + job.train_s(sum(sequences(answers))) + OPTIMIZER_S + SYNC_S


def expected_whole(job: Job, step: int, cut: bool) -> float:
    """Return the step of `whole_step`: a row begins when its last sequence and the one that does not fit are there."""
    answers = job.answers(step, cut=cut)
    arrived, lengths = job.arrivals(answers), sequences(answers)
    now, there, taken = 0.0, 0.0, iter(zip(lengths, arrived, strict=True))

    def came() -> Iterator[int]:
        nonlocal there
        for length, when in taken:
            there = max(there, when)
            yield length

    for tokens in rows(came()):
        now = max(now, there) + job.train_s(tokens)
    return now + OPTIMIZER_S + SYNC_S


def expected_pipelined(job: Job, step: int, cut: bool) -> float:
    """Return the step of `pipelined`: what was generated before is trained on while this one generates."""
    before, now = job.answers(step - 1, cut=cut), job.answers(step, cut=cut)
    return max(*job.arrivals(now), job.train_s(sum(sequences(before))) + OPTIMIZER_S) + SYNC_S


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
        bound = sum(job.bound_s(step, cut=self.cut) for step in steps)
        expected = sum(self.expected(job, step, self.cut) for step in steps)
        amounts = (sum(seconds) / self.steps, bound / self.steps)
        cells = (job.name, self.name, *(f"{one:.1f}" for one in amounts))
        return f"| {' | '.join(cells)} | {sum(seconds) / bound:.2f} | {expected / bound:.2f} |\n"


SCHEDULES = (
    Measured("one rollout at a time (stage2 0.1.0)", one_at_a_time, expected_alone, cut=False, steps=1),
    Measured("generate all, then train (ms-swift, TRL)", all_then_train, expected_after, cut=False),
    Measured("the same, loops cut", all_then_train, expected_after, cut=True),
    Measured("whole step, rows as they fill", whole_step, expected_whole, cut=True),
    Measured("pipelined", pipelined, expected_pipelined, cut=True),
)


@dataclass(frozen=True)
class ScheduleTable:
    """The table of all schedules; `title` as the other benchmarks' tables have one."""

    title: str

    def lines(self) -> Iterator[str]:
        """The table's lines; a row is measured when it is asked for."""
        yield f"\n## {self.title}\n\n{model_in_words()}\n\n"
        yield "| job | schedule | step s | bound s | step / bound | by the model alone |\n"
        yield "| --- | --- | ---: | ---: | ---: | ---: |\n"
        for job in JOBS:
            for measured in SCHEDULES:
                yield measured.row(job)


def model_in_words() -> str:
    """Return what the seconds stand for."""
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
        "the same chunks and nothing to wait for, or the learner, whichever takes longer. The client is the learner's "
        f"own; servers and learner sleep. What the client itself takes counts {SCALE:g} times here; the last column is "
        "the ratio where it takes nothing. One rollout at a time: a share of the step is asked for, and its time "
        "extended."
    )


@contextmanager
def backend_of(job: Job, *, cut: bool) -> Iterator[ServerBackend]:
    """Start a job's servers, and return the client that asks them."""
    command = [sys.executable, "-m", "bench.slow_servers", str(job.servers)]
    servers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert servers.stdout is not None
        urls = [f"http://127.0.0.1:{port}" for port in servers.stdout.readline().split()]
        sampling = Sampling(MOST_TOKENS, repetition=LOOPS if cut else None)
        with ServerBackend(urls, token="t", sampling=sampling, timeout_s=600) as backend:
            yield backend
    finally:
        servers.terminate()
        servers.wait()


TABLE = ScheduleTable("A step of an 8B on H100s, by schedule")
