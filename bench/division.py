"""A step whose requests are divided by the expected lengths of answers, against one with contiguous chunks.

Servers take time as in `bench.schedule`; what divides is the client's own `Speeds`. One table has the rollouts alone,
the other whole steps: rows train while answers come, so the order of answers counts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from bench import schedule
from bench.schedule import SEED, Job, backend_of
from bench.slow_servers import MAX_RUNNING, arrivals
from bench.timed_learner import OPTIMIZER_S, SYNC_S, Objects, TimedLearner, rollouts_of, steps_of

from stage2_trainer.matching import GTObject
from stage2_trainer.rollouts.speeds import Speeds
from stage2_trainer.wire.requests import Rollout

RECORDS, OF_AN_EVALUATION = 32, 512  # of each server
STEPS, STEPS_OF_MANY, MANY = 12, 4, 64
MODEL_STEPS, TIMED_STEPS = 40, 4
GOOD, ROUGH = 0.15, 0.5  # the sigma of an answer's length over the expected one
SLOW = 2.0  # times as long as the others
OBJECT_TOKENS = 29
COCO_OBJECTS, MOST_OBJECTS = 7.3, 93
Lengths = Sequence[int]
Shares = Mapping[str, Sequence[int]]
Divide = Callable[[Speeds, Lengths, Sequence[str]], Shares]


def long_answers(step: int, count: int) -> Lengths:
    """Return the tokens of answers as in `bench.schedule`, loops cut."""
    return Job("", 1, 1, count).answers(step, cut=True)


def coco_answers(step: int, count: int) -> Lengths:
    """Return those of answers with as many objects as images of COCO have: 7.3 in the mean, as many in deviation."""
    found = np.random.default_rng((3, step)).negative_binomial(1.0, 1 / COCO_OBJECTS, count)
    return [OBJECT_TOKENS * min(1 + int(one), MOST_OBJECTS) for one in found]


def shapes_answers(step: int, count: int) -> Lengths:
    """Return those of answers with 4 to 9 objects."""
    return [OBJECT_TOKENS * int(one) for one in np.random.default_rng((4, step)).integers(4, 10, count)]


def expected(lengths: Lengths, sigma: float) -> Lengths:
    """Return lengths that are known roughly."""
    factors = np.random.default_rng(sum(lengths)).lognormal(0.0, sigma, len(lengths))
    return [math.ceil(length * factor) for length, factor in zip(lengths, factors, strict=True)]


def contiguous(speeds: Speeds, lengths: Lengths, servers: Sequence[str]) -> Shares:
    """Divide without an expectation."""
    return speeds.divide(range(len(lengths)), servers)


def only_ordered(speeds: Speeds, lengths: Lengths, servers: Sequence[str]) -> Shares:
    """Divide without an expectation; each server begins with the longest."""
    known = expected(lengths, GOOD)
    chunks = contiguous(speeds, lengths, servers)
    return {one: sorted(chunk, key=lambda i: -known[i]) for one, chunk in chunks.items()}


def longest_first(speeds: Speeds, lengths: Lengths, servers: Sequence[str], *, sigma: float) -> Shares:
    """Divide as a run does."""
    return speeds.divide(range(len(lengths)), servers, expected(lengths, sigma))


ANSWERS = {"8B of `schedule`": long_answers, "COCO's counts": coco_answers, "4 to 9 objects": shapes_answers}
DIVISIONS: Mapping[str, Divide] = {
    "chunks, longest first in each": only_ordered,
    f"longest first, sigma {GOOD:g}": partial(longest_first, sigma=GOOD),
    f"sigma {ROUGH:g}": partial(longest_first, sigma=ROUGH),
    "oracle": partial(longest_first, sigma=0.0),
}


@dataclass(frozen=True)
class Fleet:
    """Servers, the records of each, and how many of them it is asked at once; if mixed, one server of four is slow."""

    servers: int
    records: int
    at_once: int
    mixed: bool = False

    def rollout_s(self, answers: Callable[[int, int], Lengths], divide: Divide) -> float:
        """Return the seconds of a step's rollouts, the mean of some steps; those before measure the servers."""
        names, speeds, total = [f"server {i}" for i in range(self.servers)], Speeds(), 0.0
        steps = STEPS_OF_MANY if self.servers == MANY else STEPS
        for step in range(steps + 1):
            lengths = answers(step, self.records * self.servers)
            found: list[tuple[Rollout, float]] = []
            for name, share in divide(speeds, lengths, names).items():
                found += self._rollouts(name, [lengths[i] for i in share], slow=names.index(name) % 4 == 0)
            speeds.measure([one for one, _ in found])
            total += max(until for _, until in found) if step else 0.0
        return total / steps

    def _rollouts(self, server: str, lengths: Lengths, *, slow: bool) -> Iterator[tuple[Rollout, float]]:
        """Yield a server's answers, and when they are there; each was asked for when there was room."""
        factor, room = SLOW if self.mixed and slow else 1.0, [0.0] * self.at_once
        for tokens, until in zip(lengths, arrivals(lengths, self.at_once), strict=True):
            asked = heapq.heapreplace(room, until)
            yield Rollout([], [0] * tokens, "", server, 0, "stop", seconds=factor * (until - asked)), factor * until


FLEETS = (
    *(Fleet(servers, RECORDS, MAX_RUNNING, mixed) for mixed in (False, True) for servers in (3, 8, MANY)),
    *(Fleet(servers, RECORDS, at_once) for at_once in (16, 8) for servers in (3, 8, MANY)),
    *(Fleet(servers, RECORDS, 8, mixed=True) for servers in (3, 8)),
    Fleet(3, OF_AN_EVALUATION, MAX_RUNNING),
)


class RolloutTable:
    """The rollouts of a step by the model alone, as shares of the time with contiguous chunks."""

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        yield "\n## Rollouts of a step, by the model: share of the time that contiguous chunks take\n\n"
        yield f"Servers as in `schedule`, mixed: one of four takes {SLOW:g} times as "
        yield "long. Sigma: of an answer's length over the expected one, lognormal. "
        yield f"{STEPS} steps, {STEPS_OF_MANY} with {MANY} servers. "
        yield f"{OBJECT_TOKENS} tokens an object; COCO's counts: geometric, mean {COCO_OBJECTS}.\n\n"
        yield f"| answers | servers | requests of each | at once | speeds | chunks s | {' | '.join(DIVISIONS)} |\n"
        yield f"| --- | ---: | ---: | ---: | --- | ---: |{' ---: |' * len(DIVISIONS)}\n"
        for fleet in FLEETS:
            for name, answers in ANSWERS.items():
                chunks_s = fleet.rollout_s(answers, contiguous)
                shares = [fleet.rollout_s(answers, divide) / chunks_s for divide in DIVISIONS.values()]
                of = (fleet.servers, fleet.records, fleet.at_once, "mixed" if fleet.mixed else "equal")
                cells = (name, *of, f"{chunks_s:.1f}", *(f"{one:.2f}" for one in shares))
                yield f"| {' | '.join(map(str, cells))} |\n"


@dataclass(frozen=True)
class DividedJob(Job):
    """A job whose servers get so many requests at once, divided longest first or in chunks."""

    at_once: int = MAX_RUNNING
    by_length: bool = False

    def arrivals(self, answers: Sequence[int]) -> list[float]:
        """Return when the servers have these answers."""
        names = [str(i) for i in range(self.servers)]
        divide = partial(longest_first, sigma=GOOD) if self.by_length else contiguous
        found = [0.0] * len(answers)
        for share in divide(Speeds(), answers, names).values():
            for index, when in zip(share, arrivals([answers[i] for i in share], self.at_once), strict=True):
                found[index] = when
        return found

    def truth(self, step: int) -> list[Objects]:
        """Return true objects of which there are as many as the answers' lengths let expect."""
        one = GTObject("object", "bbox", (0, 0, 1, 1))
        lengths = expected(self.answers(step, cut=True), GOOD)
        return [(one,) * (1 + length // OBJECT_TOKENS) if self.by_length else () for length in lengths]

    def step_s(self, *, pipelined: bool) -> float:
        """Return the seconds of a step of the learner's own loop, measured."""
        with backend_of(self, cut=True, at_once=self.at_once) as backend:
            source = rollouts_of(backend, SEED)
            learner = TimedLearner(source, self.gpus, self.records, pipelined=pipelined, truth=self.truth)
            learner.step(0)
            return sum(steps_of(learner, range(1, 1 + TIMED_STEPS))) / TIMED_STEPS


def expected_in_order(job: Job, step: int, cut: bool) -> float:
    """Return a step that trains on its micro-steps in order, each when it has arrived (scopes `micro`, `window`)."""
    now, answers = 0.0, job.answers(step, cut=cut)
    for tokens, arrived in zip(schedule.sequences(answers), job.arrivals(answers), strict=True):
        now = max(now, arrived) + job.gpus.train_s(tokens)
    return now + OPTIMIZER_S + SYNC_S


SCHEDULES: Mapping[str, schedule.Expected] = {
    "generate all, then train": schedule.expected_after,
    "micro-steps in order": expected_in_order,
    "rows as they fill": schedule.expected_whole,
    "pipelined": schedule.expected_pipelined,
}
MEASURED = {"rows as they fill": False, "pipelined": True}
JOBS = tuple(
    DividedJob(*layout, at_once=at_once)
    for layout in (("job-3v1", 3, 1, 32), ("3 + 3", 3, 3, 96))
    for at_once in (MAX_RUNNING, 8)
)


class StepTable:
    """Whole steps: training overlaps with answers, whose order is another one."""

    def lines(self) -> Iterator[str]:
        """The table's lines; each row is measured when it is read."""
        yield "\n## Steps, longest first: share of the time that contiguous chunks take\n\n"
        yield "Model as in `schedule`; job-3v1: 3 servers, a learner GPU, 32 records a step; 3 + 3: 3 of each, 96 "
        yield "records. "
        yield f"Servers equally fast, sigma {GOOD:g}; by the model {MODEL_STEPS} "
        yield f"steps, measured {TIMED_STEPS} of the learner's own loop.\n\n"
        yield "| job | at once | schedule | chunks s | by the model | chunks s, measured | measured |\n"
        yield "| --- | ---: | --- | ---: | ---: | ---: | ---: |\n"
        for job in JOBS:
            for name, model in SCHEDULES.items():
                yield step_row(job, name, model)


def step_row(job: DividedJob, name: str, model: schedule.Expected) -> str:
    """Return a line of the table; one that is measured takes a minute."""
    divided = DividedJob(job.name, job.servers, job.learners, job.records, job.at_once, by_length=True)
    chunks_s, ours_s = (
        sum(model(one, step, True) for step in range(1, 1 + MODEL_STEPS)) / MODEL_STEPS for one in (job, divided)
    )
    cells = [f"{chunks_s:.1f}", f"{ours_s / chunks_s:.2f}", "–", "–"]
    if name in MEASURED:
        before, after = (one.step_s(pipelined=MEASURED[name]) for one in (job, divided))
        cells[2:] = f"{before:.1f}", f"{after / before:.2f}"
    return f"| {job.name} | {job.at_once} | {name} | {' | '.join(cells)} |\n"
