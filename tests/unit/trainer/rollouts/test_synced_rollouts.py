"""A lost server costs a try, not the run; one that stays lost ends it in a way that can be gone on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from stage2_trainer.rollouts.rollout_source import GenerationRequest
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Rollout
from tests.unit.trainer.learner.harness import RecordingSync, fresh_rollouts

CHAT = [{"role": "user", "content": "hello"}]


@dataclass
class FailingBackend:
    """Fails as often as it is told, then answers."""

    failures: int
    versions: list[int | None] = field(default_factory=list)
    base_urls: tuple[str, ...] = ("http://a:1", "http://b:1")

    def generate(
        self, requests: Any, *, seed_plan: Any, version: int | None = None, on_rollout: Any = None
    ) -> list[Rollout]:
        self.versions.append(version)
        if len(self.versions) <= self.failures:
            raise ServerError("http://a:1", "rollout", "gone")
        return [Rollout([1], [2], "", "http://a:1", version or 0, "stop") for _ in requests]


@dataclass
class Run:
    backend: FailingBackend
    sync: RecordingSync = field(default_factory=RecordingSync)
    reporter: Reporter = field(default_factory=Reporter)
    waits: list[str] = field(default_factory=list)

    def generate(self, *, global_step: int = 3) -> Any:
        def wait() -> None:
            self.waits.append(self.reporter.current.phase)

        rollouts = fresh_rollouts(self.backend, self.sync, self.reporter, wait)
        return rollouts.generate(GenerationRequest(nn.Linear(1, 1), [CHAT, CHAT], global_step, 0, Stopwatch()))


def test_rollouts_are_asked_for_with_the_version_that_was_pushed():
    run = Run(FailingBackend(0))
    fresh = run.generate(global_step=3)
    assert len(fresh.rollouts) == 2
    assert (run.sync.versions, run.backend.versions) == ([3], [3])
    assert fresh.sync is not None
    assert fresh.sync.version == 3


def test_a_server_that_came_back_empty_gets_weights_and_requests_again():
    run = Run(FailingBackend(1))
    assert len(run.generate().rollouts) == 2
    assert run.sync.versions == [3, 3]
    assert run.waits == ["waiting-for-servers"]


def test_a_server_that_stays_lost_ends_the_run():
    run = Run(FailingBackend(99))
    with pytest.raises(ServerError, match="http://a:1"):
        run.generate()
    assert len(run.backend.versions) == 3


def test_the_record_says_who_answered_what_with_which_seeds_and_weights():
    batch = Run(FailingBackend(0)).generate(global_step=3)
    origin = batch.origin
    assert origin["servers"] == ["http://a:1", "http://b:1"]
    assert origin["chunks"] == [
        {"server": 0, "start": 0, "end": 1, "seed": 3000026},
        {"server": 1, "start": 1, "end": 2, "seed": 3000027},
    ]
    assert (batch.plan.base, batch.plan.position(1)) == (3000026, (0, 1))
    phases = {"connect": 0.0, "begin": 0.0, "pack": 0.2, "send": 0.4, "load": 0.2, "finish": 0.0, "prove": 0.0}
    assert origin["sync"] == {
        "requested": "full",
        "effective": "full",
        "merge": "learner",
        "merge_reason": "it was told to",
        "transport": "tcp",
        "gigabytes_per_second": 0.125,
        "phases": phases,
        "version": 3,
        "seconds": 0.25,
    }
    assert origin["generate_s"] >= 0


def test_progress_tells_phase_and_sync():
    run = Run(FailingBackend(0))
    run.generate()
    told = run.reporter.current.document()
    assert told["phase"] == "rollout"
    sync = told["sync"]
    assert (sync["version"], sync["servers"][0]["baseUrl"]) == (3, "scripted")
    assert (sync["merge"], sync["mergeReason"], sync["transport"]) == ("learner", "it was told to", "tcp")
    assert (sync["gigabytesPerSecond"], sync["phases"]["send"]) == (0.125, 0.4)


def test_before_the_first_push_it_is_known_what_will_carry_it_and_where_adapters_are_merged():
    sync = fresh_rollouts(FailingBackend(0), RecordingSync(), Reporter(), lambda: None).sync_state
    assert (sync.merge, sync.merge_reason, sync.transport) == ("learner", "it was told to", "tcp")
    assert (sync.gigabytes_per_second, sync.phases) == (None, None)
