"""Stale by choice: rollouts one window ahead, one sync old at most, in an order that does not depend on time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from stage2_trainer.rollouts.rollout_source import GenerationRequest
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Rollout
from tests.unit.trainer.learner.harness import RecordingSync, box, build, fresh_rollouts, record


@dataclass
class Served:
    """Answers with the version that it is asked for; `gate` holds answers back, `fail` lists the calls that fail."""

    asked: list[tuple[int, int | None]] = field(default_factory=list)
    fail: set[int] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    base_urls: tuple[str, ...] = ("http://a:1",)

    def generate(
        self, requests: Any, *, seed_plan: Any, version: int | None = None, on_rollout: Any = None
    ) -> list[Rollout]:
        self.asked.append((seed_plan.global_step, version))
        self.gate.wait(10)
        if len(self.asked) in self.fail:
            raise ServerError("http://a:1", "rollout", "gone")
        return [Rollout([1], [2], "", "http://a:1", version or 0, "stop") for _ in requests]


CHATS = [[{"role": "user", "content": "hello"}]] * 2
MODEL = nn.Linear(1, 1)


@pytest.fixture
def served():
    served = Served()
    served.gate.set()
    return served


@pytest.fixture
def sync():
    return RecordingSync()


@pytest.fixture
def ahead(served, sync):
    yield fresh_rollouts(served, sync, Reporter(), lambda: None)
    served.gate.set()


def request(step):
    return GenerationRequest(MODEL, CHATS, step, 0, Stopwatch(), sizes=(1, 1))


class Run:
    """Steps, as the learner asks for their rollouts."""

    def __init__(self, ahead):
        self.ahead, self.next = ahead, None

    def __call__(self, step, *, last=False):
        """Begin a step, and return the versions that made its rollouts."""
        self.ahead.sync(request(step))
        current = self.next or self.ahead.ask(request(step))
        self.next = None if last else self.ahead.ask(request(step + 1))
        return [one.version for one in current.result().rollouts]


def test_every_step_but_the_first_trains_on_rollouts_that_are_one_sync_old(ahead, served, sync):
    train = Run(ahead)
    assert [train(0), train(1), train(2, last=True)] == [[0, 0], [0, 0], [1, 1]]
    assert served.asked == [(0, 0), (1, 0), (2, 1)]
    assert sync.versions == [0, 1, 2]


def test_no_sync_while_something_is_asked_of_the_servers(ahead, served, sync):
    train = Run(ahead)
    train(0)
    ahead.sync(request(1))
    served.gate.clear()
    ahead.ask(request(2))  # is held back
    beginning = threading.Thread(target=ahead.sync, args=(request(2),))
    beginning.start()
    beginning.join(0.3)
    assert sync.versions == [0, 1]
    served.gate.set()
    beginning.join(10)
    assert sync.versions == [0, 1, 2]


def test_an_evaluation_has_fresh_rollouts_and_takes_none_of_trainings(ahead):
    train = Run(ahead)
    train(0)
    assert [one.version for one in ahead.generate(request(1)).rollouts] == [1, 1]
    assert train(1) == [0, 0]


def test_rollouts_that_were_lost_are_made_again_by_the_newest_weights(ahead, served, sync):
    served.fail = {2}  # those of step 1
    train = Run(ahead)
    assert train(0) == [0, 0]
    assert train(1, last=True) == [1, 1]
    assert served.asked[-1] == (1, 1)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_run_trains_on_the_same_samples_in_the_same_order(tmp_path, model, encoder, image_paths, pipelined):
    records = [record(path, i, object_1=box("red box", 100, 100, 400, 400)) for i, path in enumerate(image_paths)]
    harness = build(tmp_path, model, encoder, records, pipelined=pipelined, per_device_train_batch_size=1, max_steps=4)
    harness.train()
    steps = harness.lines("step")
    assert [plan.global_step for plan in harness.backend.plans] == [0, 1, 2, 3]
    assert [step["rollout/staleness"] for step in steps] == ([0, 1, 1, 0] if pipelined else [0, 0, 0, 0])
    assert [step["sync/version"] for step in steps] == [0, 1, 2, 3]
