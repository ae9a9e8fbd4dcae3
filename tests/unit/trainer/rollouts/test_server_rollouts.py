"""Rollouts of servers: a lost server costs a try, not the run, and a pipeline is one sync old at most.

A server that stays lost ends the run so that another start can resume it. The order never depends on time.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import nn

from stage2_trainer.rollouts.rollout_source import GenerationRequest
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Rollout
from tests.unit.trainer.learner.harness import RecordingPush, box, build, fresh_rollouts, record


@dataclass
class Served:
    """Answers with the version that it is asked for; `gate` holds answers back, `fail` lists the calls that fail."""

    asked: list[tuple[int, int | None]] = field(default_factory=list)
    fail: set[int] = field(default_factory=set)
    biases: list[Any] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    base_urls: tuple[str, ...] = ("http://a:1", "http://b:1")

    def generate(
        self, requests: Any, *, seed_plan: Any, version: int | None = None, on_rollout: Any = None, expected: Any = ()
    ) -> list[Rollout]:
        self.asked.append((seed_plan.global_step, version))
        self.biases += [one.bias for one in requests]
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
    return RecordingPush()


@pytest.fixture
def reporter():
    return Reporter()


@pytest.fixture
def waits():
    """The phases in which the learner has waited for its servers."""
    return []


@pytest.fixture
def rollouts(served, sync, reporter, waits):
    yield fresh_rollouts(served, sync, reporter, lambda error: waits.append(reporter.current.phase))
    served.gate.set()


def request(step, sizes=()):
    return GenerationRequest(MODEL, CHATS, step, 0, Stopwatch(), sizes=sizes)


def test_rollouts_are_requested_with_pushed_version(rollouts, served, sync):
    fresh = rollouts.generate(request(3))
    assert len(fresh.rollouts) == 2
    assert (sync.versions, served.asked) == ([3], [(3, 3)])
    assert fresh.sync.version == 3


def test_bias_of_request_applies_to_each_chat(rollouts, served):
    rollouts.generate(replace(request(3), bias={99: -1.5}))
    rollouts.generate(request(4))
    assert served.biases == [{99: -1.5}, {99: -1.5}, {}, {}]


def test_restarted_server_gets_weights_and_requests_again(rollouts, served, sync, waits):
    served.fail = {1}
    found = rollouts.generate(request(3))
    assert len(found.rollouts) == 2
    assert found.sync is rollouts.sync_state, "the push that was repeated"
    assert sync.versions == [3, 3]
    assert waits == ["waiting-for-servers"]


def test_server_that_stays_lost_stops_run(rollouts, served):
    served.fail = set(range(99))
    with pytest.raises(ServerError, match="http://a:1"):
        rollouts.generate(request(3))
    assert len(served.asked) == 3


@pytest.mark.parametrize("lost_in", ["push", "request"])
@pytest.mark.parametrize(("frozen_for", "ends"), [(1, False), (99, True)])
def test_frozen_server_gets_number_of_attempts_stated_in_log(
    served, sync, reporter, caplog, monkeypatch, lost_in, frozen_for, ends
):
    waits = []

    def wait(error):
        waits.append(error)
        if len(waits) <= frozen_for:
            raise ServerError("http://a:1", "health", "not healthy within 240 s")

    push = sync.push
    if lost_in == "push":
        errors = [ServerError("http://a:1", "push", "frozen")]

        def fail_once(model, *, version):
            if errors:
                raise errors.pop()
            return push(model, version=version)

        monkeypatch.setattr(sync, "push", fail_once)
    else:
        served.fail = {1}
    rollouts = fresh_rollouts(served, sync, reporter, wait)
    with pytest.raises(ServerError, match="not healthy") if ends else contextlib.nullcontext():
        rollouts.generate(request(3))
    assert len(waits) == 2, "the first attempt failed; each wait begins another one"
    assert [f"attempt {number} of 3" in caplog.text for number in (1, 2, 3)] == [True, True, False]


def test_batch_records_servers_and_weight_version(rollouts):
    batch = rollouts.generate(request(3))
    origin = batch.origin
    assert origin["servers"] == ["http://a:1", "http://b:1"]
    assert (batch.plan.base, batch.plan.position(1)) == (3000026, (0, 1))
    phases = {"connect": 0.0, "begin": 0.0, "pack": 0.2, "send": 0.4, "load": 0.2, "finish": 0.0, "prove": 0.0}
    assert origin["sync"] == {
        "requested": "full",
        "effective": "full",
        "merge": "learner",
        "merge_reason": "as configured",
        "transport": "tcp",
        "gigabytes_per_second": 0.125,
        "phases": phases,
        "version": 3,
        "seconds": 0.25,
        "proof_gap": None,
    }
    assert origin["generate_s"] >= 0


def test_progress_reports_phase_and_sync(rollouts, reporter):
    rollouts.generate(request(3))
    progress = reporter.current.document()
    assert progress["phase"] == "rollout"
    sync = progress["sync"]
    assert (sync["version"], sync["servers"][0]["baseUrl"]) == (3, "scripted")
    assert (sync["merge"], sync["mergeReason"], sync["transport"]) == ("learner", "as configured", "tcp")
    assert (sync["gigabytesPerSecond"], sync["phases"]["send"]) == (0.125, 0.4)


def test_transport_and_merge_place_are_known_before_first_push(rollouts):
    sync = rollouts.sync_state
    assert (sync.merge, sync.merge_reason, sync.transport) == ("learner", "as configured", "tcp")
    assert (sync.gigabytes_per_second, sync.phases) == (None, None)


class Pipeline:
    """Steps, as the learner asks for their rollouts."""

    def __init__(self, rollouts):
        self.rollouts, self.next = rollouts, None

    def __call__(self, step, *, last=False):
        """Begin a step, and return the versions that made its rollouts."""
        self.rollouts.sync(None, global_step=step, stopwatch=Stopwatch())
        current = self.next or self.rollouts.ask(request(step, (1, 1)))
        self.next = None if last else self.rollouts.ask(request(step + 1, (1, 1)))
        return [one.version for one in current.result().rollouts]


def test_pipelined_steps_train_on_rollouts_one_push_old(rollouts, served, sync):
    train = Pipeline(rollouts)
    assert [train(0), train(1), train(2, last=True)] == [[0, 0], [0, 0], [1, 1]]
    assert served.asked == [(0, 0), (1, 0), (2, 1)]
    assert sync.versions == [0, 1, 2]


def test_push_waits_for_requests_in_flight(rollouts, served, sync):
    train = Pipeline(rollouts)
    train(0)
    rollouts.sync(None, global_step=1, stopwatch=Stopwatch())
    served.gate.clear()
    rollouts.ask(request(2, (1, 1)))  # is held back
    beginning = threading.Thread(target=lambda: rollouts.sync(None, global_step=2, stopwatch=Stopwatch()))
    beginning.start()
    beginning.join(0.3)  # by the clock: nothing may happen; a slow machine can only miss the defect
    assert sync.versions == [0, 1]
    served.gate.set()
    beginning.join(10)
    assert sync.versions == [0, 1, 2]


def test_request_is_sent_after_previous_ones_are_answered(rollouts, served):
    rollouts.sync(None, global_step=0, stopwatch=Stopwatch())
    served.gate.clear()
    first, second = rollouts.ask(request(0)), rollouts.ask(request(1))
    assert not second.wait_for([], patience_s=0.3)  # by the clock: nothing may happen
    assert served.asked == [(0, 0)]
    served.gate.set()
    assert [len(one.result().rollouts) for one in (first, second)] == [2, 2]


def test_evaluation_uses_fresh_rollouts_and_keeps_those_of_training(rollouts):
    train = Pipeline(rollouts)
    train(0)
    assert [one.version for one in rollouts.generate(request(1, (1, 1))).rollouts] == [1, 1]
    assert train(1) == [0, 0]


def test_lost_rollouts_are_generated_again_with_newest_weights(rollouts, served, sync):
    served.fail = {2}  # those of step 1
    train = Pipeline(rollouts)
    assert train(0) == [0, 0]
    assert train(1, last=True) == [1, 1]
    assert served.asked[-1] == (1, 1)


@pytest.mark.parametrize("pipelined", [False, True])
def test_pipelined_run_requests_same_steps_and_logs_staleness(tmp_path, model, encoder, image_paths, pipelined):
    records = [record(path, i, object_1=box("red box", 100, 100, 400, 400)) for i, path in enumerate(image_paths)]
    harness = build(tmp_path, model, encoder, records, pipelined=pipelined, per_device_train_batch_size=1, max_steps=4)
    harness.train()
    steps = harness.lines("step")
    assert [plan.global_step for plan in harness.backend.plans] == [0, 1, 2, 3]
    assert [step["rollout/staleness"] for step in steps] == ([0, 1, 1, 0] if pipelined else [0, 0, 0, 0])
    assert [step["sync/version"] for step in steps] == [0, 1, 2, 3]


def test_joining_server_gets_all_weights_before_first_request(served, sync, reporter):
    joins = iter([False, True, False])
    rollouts = fresh_rollouts(served, sync, reporter, print)
    rollouts._follow = lambda: next(joins)
    for _ in range(3):
        rollouts.generate(request(3))
    assert sync.versions == [3, 3], "the weights had not moved"


def test_lost_servers_are_removed_only_when_no_other_request_is_in_flight(served, sync, reporter):
    served.fail, begun, held, left_out_beside = {1}, threading.Event(), threading.Event(), []
    answer = served.generate

    def generate(requests, *, seed_plan, **options):
        if seed_plan.global_step == 4 and not begun.is_set():
            begun.set()
            held.wait(0.5)  # by the clock: nothing may happen; a slow machine can only miss the defect
            held.set()
        return answer(requests, seed_plan=seed_plan, **options)

    served.generate = generate
    rollouts = fresh_rollouts(served, sync, reporter, lambda error: left_out_beside.append(not held.is_set()))
    rollouts.sync(MODEL, global_step=3, stopwatch=Stopwatch())
    answers, _ahead = rollouts.ask(request(3)), rollouts.ask(request(4))
    assert begun.wait(10), "as soon as the first one has failed"
    assert len(answers.result().rollouts) == len(CHATS)
    assert left_out_beside == [False]
