"""The interface between those who train and those who generate: a request, a batch of rollouts, and their source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from stage2_api.pod.progress import ReportedSync
from stage2_trainer.telemetry.stopwatch import Stopwatch
from stage2_trainer.weights.sync_report import SyncReport
from stage2_trainer.wire.rollout import OnRollout, Rollout

Chats = Sequence[Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one rollout for each of `chats`, by `model` as it is at `global_step`.

    micro_step: its place in the optimizer step; no other request of that step has it. stopwatch: gets the seconds that
    it takes. on_rollout: is told of each rollout at once by sources that get them one by one; the others need not.
    """

    model: nn.Module
    chats: Chats
    global_step: int
    micro_step: int
    stopwatch: Stopwatch
    on_rollout: OnRollout | None = None


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts in request order, and the sync that came before them (None when the weights had not moved).

    origin: how they came to be, for the record: servers, sync, chunk plan, seeds, seconds.
    """

    rollouts: list[Rollout]
    sync: SyncReport | None
    origin: Mapping[str, Any] = field(default_factory=dict)


class RolloutSource(Protocol):
    """A source of rollouts by the weights as they are now."""

    @property
    def sync_state(self) -> ReportedSync:
        """The last sync."""
        ...

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Return one rollout for each chat, all made by the weights of the request's step.

        With several learner processes all of them must call it equally often, with or without chats of their own.
        """
        ...
