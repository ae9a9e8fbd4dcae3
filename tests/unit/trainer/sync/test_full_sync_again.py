"""A sync that is made again, and what of the first try must not be held against a later one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stage2_api.vllm import ServerAddress
from stage2_trainer.sync.fleet.push import FullSync
from stage2_trainer.sync.fleet.report import DigestError
from stage2_trainer.wire.errors import ServerError

LOST = ServerError("http://b:8000", "push", "went away")


@pytest.fixture
def sync() -> Any:
    address = ServerAddress("http://127.0.0.1:1", 1)
    made = FullSync([address], token="t", timeout_s=1.0, device=torch.device("cpu"), adapted=False)
    yield made
    made.close()


def scripted(sync: FullSync, monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> None:
    """Let each try of a sync end so: with a report, an error, or an objection and an error."""
    left = list(outcomes)

    def attempt(model: Any, version: int) -> Any:
        outcome = left.pop(0)
        if outcome == "mismatch":
            sync.location.mismatches.append("server http://a:8000: digests differ")
            raise LOST
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(sync, "_push", attempt)


def test_after_the_group_of_all_has_ended_the_sync_is_made_again(sync: FullSync, monkeypatch: Any) -> None:
    monkeypatch.setattr(sync.fleet, "_shared", SimpleNamespace(ended=True))
    scripted(sync, monkeypatch, LOST, "report", LOST)
    assert sync.sync(torch.nn.Linear(1, 1), version=1) == "report"
    with pytest.raises(ServerError):
        sync.sync(torch.nn.Linear(1, 1), version=2)


def test_other_weights_end_the_run_though_the_group_of_all_has_ended_too(sync: FullSync, monkeypatch: Any) -> None:
    monkeypatch.setattr(sync.fleet, "_shared", SimpleNamespace(ended=True))
    sync.location.at_server = False  # no adapter trains
    scripted(sync, monkeypatch, "mismatch")
    with pytest.raises(DigestError, match="http://a:8000"):
        sync.sync(torch.nn.Linear(1, 1), version=1)


def test_an_objection_of_one_sync_is_not_held_against_the_next(sync: FullSync, monkeypatch: Any) -> None:
    sync.location.mismatches.append("server http://a:8000: digests differ")
    scripted(sync, monkeypatch, LOST)
    with pytest.raises(ServerError, match="http://b:8000"):
        sync.sync(torch.nn.Linear(1, 1), version=2)


def test_a_group_that_was_never_formed_is_forgotten_with_the_first_sync(sync: FullSync, monkeypatch: Any) -> None:
    monkeypatch.setattr(sync.fleet, "_shared", SimpleNamespace(ended=True))
    scripted(sync, monkeypatch, "report")
    sync.sync(torch.nn.Linear(1, 1), version=1)
    assert not sync.fleet.shared_group_ended()
